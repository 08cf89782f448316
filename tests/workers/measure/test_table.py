import pytest

from workers.measure.table import Column


def test_columns_are_read_from_a_text() -> None:
    assert Column.parse("name, calls: integer, total_ms: number GB per s") == [
        Column("name", "string"),
        Column("calls", "integer"),
        Column("total_ms", "number", "GB per s"),
    ]
    with pytest.raises(ValueError, match="column 'calls' has no type 'int': number, integer, string, boolean"):
        Column.parse("name, calls: int")
