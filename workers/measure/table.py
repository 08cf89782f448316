"""Tables, for results that are not numbers with samples: kernels of a profile, allocations, dtypes of modules."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Scalar = str | int | float | bool | None
Type = Literal["number", "integer", "string", "boolean"]

MAX_ROWS = 50_000
MAX_BYTES = 16 << 20
"""Most bytes of one table of one unit, as JSON."""
MAX_COLUMNS = 100
NAME = re.compile(r"[\w-][\w.-]{0,99}", re.ASCII)
"""Pattern of a table's name, which is part of a URL."""
UNIT_COLUMN = "unit_index"
"""Column that is added when tables of one name are shown as one."""

_PYTHON_TYPES: dict[Type, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "boolean": (bool,),
}


class TooLarge(ValueError):
    """A result, or all results of one kind, have more rows, samples or bytes than are kept."""


@dataclass(frozen=True)
class Column:
    """A column of a table. `unit` is the unit of all its values: "ms", "MiB", "calls"; None if they have none."""

    name: str
    type: Type
    unit: str | None = None

    @classmethod
    def parse(cls, text: str) -> list[Column]:
        """Return the columns of a text such as "name, calls: integer, total_ms: number ms"; without a type: strings.
        Raises ValueError: there is no such type."""
        columns = []
        for name, _, rest in (part.strip().partition(":") for part in text.split(",")):
            kind, _, unit = rest.strip().partition(" ")
            known = next((one for one in _PYTHON_TYPES if one == (kind or "string")), None)
            if known is None:
                raise ValueError(f"column {name!r} has no type {kind!r}: {', '.join(_PYTHON_TYPES)}")
            columns.append(cls(name, known, unit or None))
        return columns


@dataclass(frozen=True)
class Table:
    """A table of one unit. A value may be None, which means unknown. Raises TooLarge: more than MAX_ROWS rows or
    MAX_BYTES bytes; ValueError: a name is empty or not unique, a row has more or fewer values than there are columns,
    or a value has not its column's type; the message says which."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Scalar]]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no table's name: letters, digits, '.', '_', '-'; at most 100")
        if not 0 < len(self.columns) <= MAX_COLUMNS:
            raise ValueError(f"table {self.name!r} has {len(self.columns)} columns, not 1 to {MAX_COLUMNS}")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or not all(names) or UNIT_COLUMN in names:
            raise ValueError(
                f"table {self.name!r}: each column needs a name of its own, other than {UNIT_COLUMN}: {names}"
            )
        if len(self.rows) > MAX_ROWS:
            raise TooLarge(f"table {self.name!r} has {len(self.rows)} rows; {MAX_ROWS} are kept: report the top ones")
        for number, row in enumerate(self.rows):
            self._check(number, row)
        if (size := len(self.to_json())) > MAX_BYTES:
            raise TooLarge(f"table {self.name!r} has {size} bytes; {MAX_BYTES} are kept: report fewer or shorter rows")

    def _check(self, number: int, row: Sequence[Scalar]) -> None:
        if len(row) != len(self.columns):
            raise ValueError(f"table {self.name!r}, row {number}: {len(row)} values for {len(self.columns)} columns")
        for column, value in zip(self.columns, row, strict=True):
            if value is None:
                continue
            fits = isinstance(value, _PYTHON_TYPES[column.type])
            if isinstance(value, bool) and column.type != "boolean":
                fits = False
            if not fits or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"table {self.name!r}, row {number}: {column.name} is {value!r}, no {column.type}")

    def to_json(self) -> bytes:
        return json.dumps([list(row) for row in self.rows], ensure_ascii=False, allow_nan=False).encode(
            errors="replace"
        )

    def to_wire(self) -> dict[str, Any]:
        columns = [asdict(column) for column in self.columns]
        return {"name": self.name, "columns": columns, "rows": [list(row) for row in self.rows]}


def first_rows(name: str, rows: Sequence[Sequence[Scalar]]) -> Sequence[Sequence[Scalar]]:
    """Return the first MAX_ROWS rows of a table; log the number of rows if there are more."""
    if len(rows) > MAX_ROWS:
        sys.stderr.write(f"table {name}: the first {MAX_ROWS} of {len(rows)} rows are kept\n")
    return rows[:MAX_ROWS]
