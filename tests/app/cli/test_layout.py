"""Tables of commands on a terminal, and in a pipe."""

import pytest
from rich.cells import cell_len

from app.cli import layout


@pytest.fixture
def _of_60(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("_of_60")
class TestTable:
    def test_columns_that_do_not_fit_follow_with_the_rows_keys(self) -> None:
        head = ["model", "length", *(f"metric_{n}" for n in range(6))]
        rows = [["tiny", length, *(f"{length}.{n:09}" for n in range(6))] for length in ("8", "16")]
        first, second, third, *rest = layout.table(head, rows, rights={1, 2}).split("\n\n")
        assert (first, rest) == ("model: tiny", [])
        assert second.splitlines()[0].split()[0] == third.splitlines()[0].split()[0] == "length"
        texts = {text for part in (second, third) for line in part.splitlines()[-2:] for text in line.split()}
        assert texts == {text for row in rows for text in row[1:]}

    @pytest.mark.parametrize("columns", [60, 40, 24, 16])
    def test_nothing_is_cropped(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        rows = [[f"forward_ms_of_the_largest_{at}", f"1.234{at}"] for at in range(2)]
        text = layout.table(["metric", "median"], rows, rights={1})
        assert max(map(len, text.splitlines())) <= columns
        assert {number for _, number in rows} < {*text.split()}
        names = [word for word in text.split() if word not in ("metric", "median", *(number for _, number in rows))]
        assert "".join(names) == "".join(name for name, _ in rows)

    def test_many_columns_that_identify_the_rows(self) -> None:
        """Six columns of 16 characters, which together identify the rows: they follow in parts."""
        rows = [[f"{at:04}{'x' * 8}{(number >> at) % 2:04}" for at in range(6)] for number in range(64)]
        text = layout.table([*"abcdef"], rows)
        assert max(map(len, text.splitlines())) <= 60
        assert set(text.split()) == {*"abcdef", *(value for row in rows for value in row)}

    def test_wide_characters_take_two_cells(self) -> None:
        rows = [[number, *(3 * ["模型" * 5])] for number in "12"]
        text = layout.table(["id", "name", "labels", "note"], [*rows, ["3", "a", "b", "c"]])
        assert max(map(cell_len, text.splitlines())) <= 60
        assert text.count("模型" * 5) == 6, "none is broken"
