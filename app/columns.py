"""Names and types of the columns of tables."""

from collections.abc import Collection, Iterable
from typing import Literal

ColumnType = Literal["number", "integer", "string", "boolean"]


def type_of(values: Iterable[object]) -> ColumnType:
    """Return the type of a column with these values, some of which may be None."""
    types = {type(value) for value in values} - {type(None)}
    if types and types <= {int, float}:
        return "integer" if types == {int} else "number"
    return "boolean" if types == {bool} else "string"


def free_names(names: Iterable[str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """Return for each name its column name: "case.n" where a column `n` exists already."""
    return {name: f"{prefix}.{name}" if name in taken else name for name in names}
