"""Columns as a reader wants them: under other names, and with the spread of a statistic beside it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from app.columns import ColumnType
from app.errors import InvalidRequest, nearest
from app.results.arranging import coordinate_of
from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet
from flopwatch.table_options import Statistic

SPREADS: dict[Statistic | None, Sequence[tuple[str, str]]] = {
    "mean": (("_std", "spread"),),
    "median": (("_low", "low"), ("_high", "high")),
}
"""The columns beside a statistic: the end of each one's name, and the attribute of Cell."""
GAIN_ENDS = SPREADS["median"]
"""Those beside a ratio."""


def renamed(sheet: Sheet, names: Sequence[tuple[str, str]]) -> Sheet:
    """Return the sheet with other names of columns, in every format: a column's own, that of a metric which a pivot
    spreads over several, or that of the pivot's coordinate.

    Raises InvalidRequest if there is no such column, a new name is blank, or two columns would have one name, also of
    those that some formats have beside a metric (`step_ms_std`).
    """
    if not names:
        return sheet
    known = list(dict.fromkeys(part for column in sheet.columns for part in _parts(column)))
    wanted = {coordinate_of(name, known): new for name, new in names}
    for name, new in wanted.items():
        if not new.strip():
            raise _refused(f"The new name of {name!r} is blank: write {name}=NAME.")
        if name not in known and sheet.columns:
            raise _refused(f"There is no column {name!r} to rename{nearest(name, known)}")
    columns = [_renamed(column, wanted) for column in sheet.columns]
    named = Counter(name for column in columns for name in {column.name, *_more_names(column, sheet)})
    if twice := next((name for name, count in named.items() if count > 1), None):
        raise _refused(f"Two columns would be called {twice!r}: choose another name.")
    return replace(sheet, columns=columns)


def _refused(detail: str) -> InvalidRequest:
    return InvalidRequest.at("/rename", detail)


def _parts(column: Column) -> list[str]:
    return [column.name] if column.group is None else [column.group, str(column.head).partition("=")[0]]


def _renamed(column: Column, wanted: dict[str, str]) -> Column:
    literal = [wanted[part] for part in _parts(column) if part in wanted]
    if column.group is None:
        return replace(column, name=wanted.get(column.name, column.name), literal=literal)
    coordinate, _, value = str(column.head).partition("=")
    group, head = wanted.get(column.group, column.group), f"{wanted.get(coordinate, coordinate)}={value}"
    return replace(column, name=f"{group}, {head}", group=group, head=head, literal=literal)


def more_columns(column: Column, sheet: Sheet) -> list[tuple[str, str, ColumnType, str | None]]:
    """Return the columns that JSON and CSV have beside the value of a metric: the end of the column's name, the
    attribute of Cell, the type and the unit. None for a column of scalars."""
    more: list[tuple[str, str, ColumnType, str | None]] = []
    if column.role == "metric":
        more += [(suffix, attribute, "number", column.unit) for suffix, attribute in SPREADS.get(sheet.statistic, ())]
        more.append(("_n", "n", "integer", None))
    if column.role == "gain":
        more += [(suffix, attribute, "number", "1") for suffix, attribute in GAIN_ENDS]
    if column.role in ("metric", "gain"):
        more.append(("_outcome", "outcome", "string", None))
        if sheet.traces:
            more += [("_job", "job", "integer", None), ("_validity", "validity", "string", None)]
    return more


def name_beside(column: Column, suffix: str) -> str:
    """Return the name that JSON and CSV give a column beside a metric's."""
    return column.name + suffix if column.group is None else f"{column.group}{suffix}, {column.head}"


def _more_names(column: Column, sheet: Sheet) -> set[str]:
    suffixes = [suffix for suffix, *_ in more_columns(column, sheet)]
    return {name for suffix in suffixes for name in (name_beside(column, suffix), _beside(column, suffix).name)}


def separated(sheet: Sheet) -> Sheet:
    """Return the sheet for people with the spread of each number in columns of its own, as CSV has it: the standard
    deviation of a mean, the ends of a median's interval or range, or of a gain's interval."""
    spread: dict[str, Sequence[tuple[str, str]]] = {"metric": SPREADS.get(sheet.statistic, ()), "gain": GAIN_ENDS}
    columns: list[Column] = []
    parts: list[Callable[[Sequence[Any]], Any]] = []
    for at, column in enumerate(sheet.columns):
        ends = spread.get(column.role, ())
        columns.append(column)
        parts.append(partial(_without_spread, at) if ends else itemgetter(at))
        for suffix, attribute in ends:
            columns.append(_beside(column, suffix))
            parts.append(partial(_alone, at, attribute))
    return replace(sheet, columns=columns, rows=[[part(row) for part in parts] for row in sheet.rows])


def _beside(column: Column, suffix: str) -> Column:
    if column.head is not None:
        return replace(column, name=name_beside(column, suffix), head=f"{column.head} {suffix[1:]}")
    name = f"{column.name} {suffix[1:]}" if column.literal else column.name + suffix
    return replace(column, name=name, literal=[name] if column.literal else [])


def _without_spread(at: int, row: Sequence[Any]) -> Cell:
    cell: Cell = row[at]
    return replace(cell, spread=None, low=None, high=None, least=None, greatest=None)


def _alone(at: int, attribute: str, row: Sequence[Any]) -> Cell:
    value = getattr(row[at], attribute)
    if value is None:  # of fewer numbers than an interval takes, the range
        value = getattr(row[at], {"low": "least", "high": "greatest"}.get(attribute, attribute))
    return NOT_MEASURED if value is None else Cell(value, None, None, "ok")
