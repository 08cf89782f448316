"""Compares the tables of times that two profiles reported: ms and calls per step that the candidate gained or lost.

Work (the table `work`) is matched by what launched it, in the order of LEVELS: a compiled kernel is renamed by any
change of its neighbours, and a library chooses another kernel for another shape. What no level matches has come or
gone, so that all rows together are the whole difference. On a GPU the table `waits` has the rest of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from app.results.matching import LARGE, Difference, Key, Spent, added, amount, by_key, columns, matched, signed, told
from app.results.sheet import Column, Sheet
from app.results.sides import SIDES, Pair, Side, SideName
from app.results.unit_tables import table_of, tables_of
from app.specs import Scalar
from app.store.database.engine import Snapshot

WORK, WAITS, LINES = "work", "waits", "lines"
OUTSIDE = "outside"
"""The range of work that is in none."""
JOINED = {
    LINES: ("file", "function", "code"),
    WAITS: ("class",),
    WORK: ("phase", "range", "operator", "shapes", "name", "class"),
    "classes": ("scope", "class"),
}
"""Tables that are compared, and the columns that identify a row."""
LEVELS = {WORK: ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (0, 1, 2), (0, 4)), LINES: ((0, 1, 2), (1, 2))}
"""By which columns rows are matched; those of other tables by all. Of `work`: all, then without the kernel's name, then
without the shapes of the operator's inputs, and last by phase and name, for work whose range is named otherwise. Lines:
last without the file, which may be another version's."""
RUNS = ("running", "copies", "communication")
"""The classes of `waits` in which a device works: the rows of `work` explain them."""
ONE_EACH = (
    "One profile of each side cannot tell a difference of some 2 % from chance: `--alternate` measures both in turns, "
    "and gives each row an interval."
)
TIMES = ("self_ms", "total_ms", "device_ms", "host_ms")
"""Columns of time per step. The first that both sides have values of is compared."""
DOUBLE = "f64["
"""In the shapes of an operator's inputs: one is in float64."""
PHASES = ("forward", "backward", "forward_backward", "optimizer", "step", "prefill", "decode")
"""The order of phases; others follow."""
NESTED = ("forward", "forward_backward", "step")
"""Scopes of classes, each with the work of those before it: the largest that both sides have is compared."""


@dataclass(frozen=True)
class ComparedTable:
    """The rows of one table and phase that both sides reported, by the columns that identify them."""

    kind: str
    phase: str | None
    baseline: Mapping[Key, Spent]
    candidate: Mapping[Key, Spent]

    @property
    def title(self) -> str:
        """Return the table and its phase, for people."""
        return self.kind if self.phase is None else f"{self.kind} ({self.phase})"

    @cached_property
    def differences(self) -> list[Difference]:
        """Return the rows, those that changed most first."""
        levels = LEVELS.get(self.kind, (range(len(JOINED[self.kind])),))
        found = matched(self.baseline, self.candidate, levels)
        # All classes are listed, so a missing class could not be determined. A missing kernel did not run.
        known = self.kind != "classes"
        return sorted(found, key=lambda one: -abs(one.change if known or (one.baseline and one.candidate) else 0.0))

    def compared(self) -> list[list[Scalar]]:
        """Return the rows of the sheet."""
        return [
            [self.kind, *self._place(one.key), *one.numbers(known=self.kind != "classes")]
            for one in self.differences
            if any(one.means)
        ]

    def _place(self, key: Key) -> list[Scalar]:
        if self.kind == WORK:
            phase, path, operator, shapes, name, class_name = key
            return [phase, name, class_name, " ".join(str(one) for one in (path, operator, shapes) if one)]
        if self.kind == LINES:
            file, function, code = key
            return [None, code or function, None, " ".join(str(one) for one in (file, function) if one and code)]
        return [self.phase, key[-1], key[-1], None]


@dataclass(frozen=True)
class ComparedProfiles:
    """The tables of two profiles that can be compared."""

    tables: Sequence[ComparedTable]
    of_one_side: Mapping[SideName, Sequence[str]]
    """The names of tables, and scopes of classes, that only one side has."""

    unit = "ms"
    what = "Work by phase, range, operator and kernel: as wide as on the slower side"

    @classmethod
    def read(cls, snapshot: Snapshot, pair: Pair) -> ComparedProfiles | None:
        """Read the tables of both sides; None if they have none in common, one of the jobs has not succeeded, or a side
        has several."""
        if any(len(side.jobs) != 1 or side.jobs[0].state != "succeeded" for side in pair.both):
            return None
        tables: list[ComparedTable] = []
        of_one_side: dict[SideName, list[str]] = {name: [] for name in SIDES}
        ones, others = (_names(snapshot, side) for side in pair.both)
        for name in sorted({*ones, *others}, key=list(JOINED).index):
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
        scopes = [table for table in tables if table.kind == "classes" and table.phase in NESTED]
        tables = [table for table in tables if table not in scopes or table is scopes[-1]]
        return cls(tables, of_one_side) if tables else None

    def sheet(self, limit: int | None) -> Sheet:
        """Return all tables as one, with notes on rows that are left out: of each table and phase, at most `limit` rows
        are shown, those with the largest changes."""
        rows = [row for table in self.tables if table.kind == WORK for row in _totals(table)]
        cut = []
        for table in self.tables:
            compared = table.compared()
            if limit is not None and len(compared) > limit:
                cut.append(f"{len(compared)} rows of {table.title}")
            rows += compared[:limit]
        notes = [f"Shown are the {limit} that changed most of {', '.join(cut)}."] if cut else []
        notes += [f"Only the {side} has {', '.join(names)}." for side, names in self.of_one_side.items() if names]
        has_intervals = any(row[-4] is not None for row in rows)
        if not has_intervals:
            notes.append(ONE_EACH)
        place = [Column(name, "string") for name in ("table", "phase", "name", "class")]
        where = Column("where", "string", in_text=any(row[4] is not None for row in rows))
        shown = [replace(one, in_text=has_intervals or "ratio_" not in one.name) for one in columns("ms", "calls")]
        return Sheet([*place, *shown, where], [[*row[:4], *row[5:], row[4]] for row in rows], notes=notes)

    @property
    def work(self) -> Sequence[Difference]:
        """The rows of `work`, those that changed most first."""
        return self._differences(WORK) or []

    def flames(self) -> Iterator[tuple[list[str], float, float]]:
        """Yield the work of both sides: phase, ranges, operator and kernel, and the ms of each side."""
        for one in self.work:
            phase, path, operator, _, name, _ = one.key
            ranges = [] if path in (None, OUTSIDE) else str(path).split("/")
            frames = [str(part) for part in (None if phase == "step" else phase, *ranges, operator, name) if part]
            yield list(dict.fromkeys(frames)), *one.means

    def _differences(self, kind: str) -> list[Difference] | None:
        """Return the rows of a table that has no phases of its own; None if the sides do not have it."""
        return next((table.differences for table in self.tables if table.kind == kind), None)

    def explained(self) -> str | None:
        """Return a sentence: by how much a step is slower, and for what; None without the table `work`.

        On a CPU the lines of the user's code tell it, if there are any: they have the time of Python, too.
        """
        if not (work := self.work):
            return None
        parts: dict[str, float] = defaultdict(float)
        for one in work:
            _, path, *_, class_name = one.key
            parts[f"{class_name} in {path}" if path else str(class_name)] += one.change
        busy = sum(parts.values())
        waits, lines = self._differences(WAITS), self._differences(LINES)
        total, what = busy, "work"
        if waits is not None:
            what = "a step"
            changes = {str(one.key[0]): one.change for one in waits}
            total = sum(changes.values())
            parts |= {cause: change for cause, change in changes.items() if cause not in RUNS}
            # Kernels that overlap take less than the sum of their times.
            parts["overlap"] = sum(changes.get(cause, 0.0) for cause in RUNS) - busy
        if waits is None and lines is not None:
            parts, what = _of_lines(lines), "a step"
            total = sum(one.change for one in lines)
        named = told(parts, total, "ms")
        verb = "longer" if total > 0 else "less"
        double = sum(one.change for one in work if DOUBLE in str(one.key[3]))
        in_double = f" ({signed(double, 'ms')} in float64)" if abs(double) > LARGE * abs(busy) else ""
        return f"By the profiles, {what} takes {amount(abs(total))} ms {verb}{in_double}: {named}" if named else None


def _of_lines(lines: Sequence[Difference]) -> dict[str, float]:
    """Return the change of each line or, of a function whose lines mostly cancel each other, of the whole function: a
    line that became three is no difference."""
    of: dict[Scalar, list[Difference]] = defaultdict(list)
    for one in lines:
        if one.key[2]:
            of[one.key[1]].append(one)
    parts = defaultdict[str, float](float)
    for function, its in of.items():
        change = sum(one.change for one in its)
        if 2 * abs(change) < sum(abs(one.change) for one in its):
            parts[str(function)] += change
            continue
        for one in its:
            parts[f"`{one.key[2]}` in {function}"] += one.change
    return parts


def _names(snapshot: Snapshot, side: Side) -> list[str]:
    return [
        table["name"]
        for table in tables_of(snapshot, side.jobs[0].id)
        if (needed := JOINED.get(table["name"])) is not None
        and {*needed} <= {column["name"] for column in table["columns"]}
        and (side.units is None or side.units & {*table["units"]})
    ]


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _compared(name: str, sheets: Sequence[Sheet], units: Sequence[frozenset[int] | None]) -> list[ComparedTable]:
    """Return the rows of one table, apart for each phase; a table of classes has several (`scope`)."""
    time = next((time for time in TIMES if all(_has_values(sheet, time) for sheet in sheets)), None)
    if time is None:
        return []
    ones, others = (by_key(sheet, JOINED[name], time, of_side) for sheet, of_side in zip(sheets, units, strict=True))
    if name != "classes":
        return [ComparedTable(name, None, ones, others)]
    scopes = sorted({str(key[0]) for key in (*ones, *others)}, key=_order)

    def inside(rows: Mapping[Key, Any], scope: str) -> dict[Key, Any]:
        return {key: row for key, row in rows.items() if str(key[0]) == scope}

    return [ComparedTable(name, scope, inside(ones, scope), inside(others, scope)) for scope in scopes]


def _has_values(sheet: Sheet, column: str) -> bool:
    return column in sheet.names() and any(value is not None for value in sheet.column(column))


def _totals(table: ComparedTable) -> list[list[Scalar]]:
    at = JOINED[WORK].index("phase")
    rows: list[list[Scalar]] = []
    for phase in dict.fromkeys(key[at] for key in (*table.baseline, *table.candidate)):
        sides = [
            [times for key, times in side.items() if key[at] == phase] for side in (table.baseline, table.candidate)
        ]
        one, other = (added(side) if side else None for side in sides)
        rows.append(["total", phase, "all work", None, None, *Difference((), one, other).numbers(known=True)])
    return rows
