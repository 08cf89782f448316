"""Columns as a reader wants them: under other names, and with the spread of a statistic beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from app.errors import FieldError, InvalidRequest
from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet
from flopwatch.table_options import Statistic

SPREADS: dict[Statistic | None, Sequence[tuple[str, str]]] = {
    "mean": (("_std", "spread"),),
    "median": (("_low", "low"), ("_high", "high")),
}
"""The columns beside a statistic: the end of each one's name, and the attribute of Cell."""
GAIN_ENDS = (("_low", "low"), ("_high", "high"))


def renamed(sheet: Sheet, names: Sequence[tuple[str, str]]) -> Sheet:
    """Return the sheet with other names of columns, in every format: a column's own, that of a metric which a pivot
    spreads over several, or that of the pivot's coordinate.

    Raises InvalidRequest if there is no such column, or if two columns would have one name.
    """
    wanted = dict(names)
    if not wanted:
        return sheet
    known = list(dict.fromkeys(part for column in sheet.columns for part in _parts(column)))
    for name in wanted:
        if name not in known and sheet.columns:
            raise _refused(f"There is no column {name!r} to rename; there is {', '.join(known)}.")
    columns = [_renamed(column, wanted) for column in sheet.columns]
    every = [column.name for column in columns]
    if twice := next((name for at, name in enumerate(every) if name in every[:at]), None):
        raise _refused(f"Two columns would be called {twice!r}: choose another name.")
    said = [f"{name} is called {new}" for name, new in wanted.items() if any(name in note for note in sheet.notes)]
    notes = [*sheet.notes, *([f"In this table {', '.join(said)}."] if said else [])]
    return replace(sheet, columns=columns, notes=notes)


def _refused(detail: str) -> InvalidRequest:
    return InvalidRequest(detail, errors=(FieldError("/rename", detail),))


def _parts(column: Column) -> list[str]:
    """Return the names that a column can be renamed by."""
    return [column.name] if column.group is None else [column.group, str(column.head).partition("=")[0]]


def _renamed(column: Column, wanted: dict[str, str]) -> Column:
    literal = [wanted[part] for part in _parts(column) if part in wanted]
    if column.group is None:
        return replace(column, name=wanted.get(column.name, column.name), literal=literal)
    coordinate, _, value = str(column.head).partition("=")
    group, head = wanted.get(column.group, column.group), f"{wanted.get(coordinate, coordinate)}={value}"
    return replace(column, name=f"{group}, {head}", group=group, head=head, literal=literal)


def separated(sheet: Sheet) -> Sheet:
    """Return the sheet for people with the spread of each number in columns of its own, as CSV has it: the standard
    deviation of a mean, the ends of a median's or a gain's interval."""
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
        return replace(column, name=column.name + suffix, head=f"{column.head} {suffix[1:]}")
    name = f"{column.name} {suffix[1:]}" if column.literal else column.name + suffix
    return replace(column, name=name, literal=[name] if column.literal else [])


def _without_spread(at: int, row: Sequence[Any]) -> Cell:
    cell: Cell = row[at]
    return replace(cell, spread=None, low=None, high=None)


def _alone(at: int, attribute: str, row: Sequence[Any]) -> Cell:
    value = getattr(row[at], attribute)
    return NOT_MEASURED if value is None else Cell(value, None, None, "ok")
