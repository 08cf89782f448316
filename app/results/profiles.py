"""Compares the tables of times that two profiles reported: ms and calls per step that the candidate gained or lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.results.sheet import Column, Sheet
from app.results.sides import SIDES, Pair, Side, SideName
from app.results.unit_tables import UNIT_INDEX, table_of, tables_of
from app.specs import Scalar
from app.store.database.engine import Snapshot

JOINED = {"classes": ("scope", "class"), "kernels": ("name", "class"), "operators": ("name", "class")}
"""Tables that are compared, by the part of their names before "-", and the columns that identify a row."""
RANGE = "range"
TIMES = ("total_ms", "device_ms", "host_ms")
"""Columns of time per step. The first that both sides have values of is compared."""
CALLS = "calls"
PHASES = ("forward", "backward", "forward_backward", "optimizer", "step", "prefill", "decode")
"""The order of phases; others follow."""
DIFFERENCE = (
    Column("baseline_ms", "number", "ms"),
    Column("candidate_ms", "number", "ms"),
    Column("change_ms", "number", "ms"),
    Column("ratio", "number"),
    Column("baseline_calls", "number", "calls"),
    Column("candidate_calls", "number", "calls"),
)
"""Columns of the differences; `ratio` is candidate / baseline. Null: that side did not run the kernel or operator, or
could not determine the class.
"""

Key = tuple[Scalar, ...]
"""The columns that identify a row."""
Times = tuple[float, float | None]
"""ms and calls per step."""


@dataclass(frozen=True)
class ComparedTable:
    """The rows of one table and phase that both sides reported, by the columns that identify them."""

    kind: str
    phase: str | None
    baseline: Mapping[Key, Times]
    candidate: Mapping[Key, Times]

    @property
    def title(self) -> str:
        """Return the table and its phase, for people."""
        return self.kind if self.phase is None else f"{self.kind} ({self.phase})"

    def compared(self) -> list[list[Scalar]]:
        """Return the table's rows, those that changed most first."""
        rows: list[tuple[float, list[Scalar]]] = []
        for key in dict.fromkeys([*self.baseline, *self.candidate]):
            *_, name, class_name = key
            (baseline, calls), (candidate, other_calls) = (
                side.get(key, (None, None)) for side in (self.baseline, self.candidate)
            )
            change, ratio = change_and_ratio(baseline, candidate)
            # All classes are listed, so a missing class could not be determined. A missing kernel did not run.
            if self.kind != "classes":
                change = (candidate or 0.0) - (baseline or 0.0)
            place = (self.kind, self.phase, class_name if self.kind == "classes" else name)
            rows.append(
                (abs(change or 0.0), [*place, class_name, baseline, candidate, change, ratio, calls, other_calls])
            )
        return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


@dataclass(frozen=True)
class ComparedProfiles:
    """The tables of two profiles that can be compared."""

    tables: Sequence[ComparedTable]
    of_one_side: Mapping[SideName, Sequence[str]]
    """The names of tables, and scopes of classes, that only one side has."""

    @classmethod
    def read(cls, snapshot: Snapshot, pair: Pair) -> ComparedProfiles | None:
        """Read the tables of both sides; None if they have none in common, one of the jobs has not succeeded, or a side
        has several.
        """
        if any(len(side.jobs) != 1 or side.jobs[0].state != "succeeded" for side in pair.both):
            return None
        tables: list[ComparedTable] = []
        of_one_side: dict[SideName, list[str]] = {name: [] for name in SIDES}
        ones, others = (_names(snapshot, side) for side in pair.both)
        for name in sorted({*ones, *others}, key=_place):
            if name not in ones or name not in others:
                of_one_side["baseline" if name in ones else "candidate"].append(name)
                continue
            sheets = [table_of(snapshot, side.jobs[0].id, name) for side in pair.both]
            for table in _compared(name, sheets, [side.units for side in pair.both]):
                # A side without any row of a phase has no such work to compare.
                if table.baseline and table.candidate:
                    tables.append(table)
                elif table.baseline or table.candidate:
                    of_one_side["baseline" if table.baseline else "candidate"].append(table.title)
        return cls(tables, of_one_side) if tables else None

    def sheet(self, limit: int | None) -> Sheet:
        """Return all tables as one, with notes on rows that are left out: of each table and phase, at most `limit` rows
        are shown, those with the largest changes."""
        totals = [_total(table) for table in self.tables if table.kind == "kernels"]
        totals = totals or [_total(table) for table in self.tables if table.kind == "operators"]
        rows: list[list[Scalar]] = list(totals)
        cut = []
        for table in self.tables:
            compared = table.compared()
            if limit is not None and len(compared) > limit:
                cut.append(f"{len(compared)} {table.title}")
            rows += compared[:limit]
        notes = [f"Shown are the {limit} that changed most of {', '.join(cut)}."] if cut else []
        notes += [f"Only the {side} has {', '.join(names)}." for side, names in self.of_one_side.items() if names]
        place = [Column(name, "string") for name in ("table", "phase", "name", "class")]
        return Sheet([*place, *DIFFERENCE], rows, notes=notes)


def change_and_ratio(baseline: float | None, candidate: float | None) -> tuple[float | None, float | None]:
    """Return candidate - baseline and candidate / baseline, each None if unknown."""
    if baseline is None or candidate is None:
        return None, None
    return candidate - baseline, candidate / baseline if baseline else None


def _names(snapshot: Snapshot, side: Side) -> list[str]:
    """Return the names of the side's tables that can be compared."""
    return [
        table["name"]
        for table in tables_of(snapshot, side.jobs[0].id)
        if (needed := JOINED.get(table["name"].partition("-")[0])) is not None
        and {*needed} <= (columns := {column["name"] for column in table["columns"]})
        and RANGE not in columns  # the same work as the tables of phases have
        and (side.units is None or side.units & {*table["units"]})
    ]


def _place(name: str) -> tuple[int, int, str]:
    kind, _, phase = name.partition("-")
    return list(JOINED).index(kind), _order(phase), phase


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _compared(name: str, sheets: Sequence[Sheet], units: Sequence[frozenset[int] | None]) -> list[ComparedTable]:
    """Return the rows of one table, apart for each phase; a table of classes has several (`scope`)."""
    kind, _, phase = name.partition("-")
    time = next((time for time in TIMES if all(_has_values(sheet, time) for sheet in sheets)), None)
    if time is None:
        return []
    ones, others = (_by_key(sheet, JOINED[kind], time, of_side) for sheet, of_side in zip(sheets, units, strict=True))
    if kind != "classes":
        return [ComparedTable(kind, phase or None, ones, others)]
    scopes = sorted({str(key[0]) for key in (*ones, *others)}, key=_order)

    def inside(rows: Mapping[Key, Any], scope: str) -> dict[Key, Any]:
        return {key: row for key, row in rows.items() if str(key[0]) == scope}

    return [ComparedTable(kind, scope, inside(ones, scope), inside(others, scope)) for scope in scopes]


def _has_values(sheet: Sheet, column: str) -> bool:
    return column in sheet.names() and any(value is not None for value in sheet.column(column))


def _by_key(sheet: Sheet, identity: Sequence[str], time: str, units: frozenset[int] | None) -> dict[Key, Times]:
    """Return time and calls of each row. If several processes measured them: means over the processes.

    A process whose table lacks a row did not run it.
    """
    names = sheet.names()
    at = {name: names.index(name) for name in (UNIT_INDEX, *identity, time)}
    calls_at = names.index(CALLS) if CALLS in names else None
    by_key: dict[Key, dict[int, tuple[float, float]]] = {}
    processes = set()
    for row in sheet.rows:
        unit = row[at[UNIT_INDEX]]
        if (units is not None and unit not in units) or row[at[time]] is None:
            continue
        processes.add(unit)
        calls = row[calls_at] if calls_at is not None else None
        of_unit = by_key.setdefault(tuple(row[at[name]] for name in identity), {})
        before = of_unit.get(unit, (0.0, 0.0))
        of_unit[unit] = (before[0] + row[at[time]], before[1] + (calls or 0.0))

    def mean(values: Callable[[tuple[float, float]], float], of_unit: Mapping[int, tuple[float, float]]) -> float:
        return statistics.fmean(values(of_unit.get(unit, (0.0, 0.0))) for unit in processes)

    return {
        key: (
            mean(lambda both: both[0], of_unit),
            None if calls_at is None else _whole(mean(lambda both: both[1], of_unit)),
        )
        for key, of_unit in by_key.items()
    }


def _whole(number: float) -> float:
    """Return a number of calls, as an integer if it is one."""
    return int(number) if number.is_integer() else number


def _total(table: ComparedTable) -> list[Scalar]:
    """Return the row with the sums of a phase."""
    (baseline, calls), (candidate, other_calls) = (
        (sum(row[0] for row in side.values()), sum(row[1] or 0 for row in side.values()))
        for side in (table.baseline, table.candidate)
    )
    return [
        "total",
        table.phase,
        f"all {table.kind}",
        None,
        baseline,
        candidate,
        *change_and_ratio(baseline, candidate),
        calls,
        other_calls,
    ]
