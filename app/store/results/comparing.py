"""Compares two finished jobs, or the two sides of a job of kind `compare`.

Jobs whose units reported what took the time (tables `classes`, `kernels-<phase>`, `operators-<phase>` of a profile) are
compared row by row: ms and calls per step that the candidate gained or lost. All others are compared metric by metric,
by the medians of their samples.

Cases meet by their coordinates. Those that each side has one value of, and in which the sides differ (precision=fp32 →
bf16), are what is compared: they are told apart from the rows, and do not keep cases from meeting.

The jobs ran at different times, unless one job measured both sides in turns. `alternated` says which.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, Row

from app.errors import Conflict, FieldError, InvalidRequest
from app.layout import ARROW, case_text, in_use
from app.specs import KINDS, Scalar
from app.states import VERDICTS
from app.store.engine import Database
from app.store.results import choosing
from app.store.results.pivoting import CaseOfJob, cases_of, cell_of, coordinates_of
from app.store.results.reported import UNIT_INDEX, list_tables, result_table
from app.store.results.sheet import NOT_MEASURED, Cell, Column, Sheet, free_names, type_of

SideName = Literal["baseline", "candidate"]
SIDES: tuple[SideName, SideName] = ("baseline", "candidate")
JOINED = {"classes": ("scope", "class"), "kernels": ("name", "class"), "operators": ("name", "class")}
"""Tables that are compared, by the part of their names before "-", and the columns that identify a row."""
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
"""Columns of what differs; `ratio` is candidate / baseline. Null: that side did not run the kernel or operator,
or could not tell the class.
"""
NOT_ALTERNATED = "The jobs ran one after the other: what changed on the host between them counts as a difference."
ALTERNATED = "Fresh processes measured both sides in turns."

Key = tuple[Scalar, ...]


@dataclass(frozen=True)
class _Side:
    """One of the two that are compared."""

    name: SideName
    job: Row[Any]
    cases: Sequence[CaseOfJob]
    metrics: Mapping[str, str]
    """The unit of each metric's column."""
    units: frozenset[int] | None
    """Indexes of the side's units; None: all of the job."""

    @property
    def validity(self) -> str | None:
        """The worst verdict of the side's cases."""
        found = {case.validity() for case in self.cases}
        return next((verdict for verdict in reversed(VERDICTS) if verdict in found), None)

    def about(self) -> dict[str, Any]:
        return {
            "job": self.job.id,
            "kind": self.job.kind,
            "state": self.job.state,
            "validity": self.validity,
            "url": f"/jobs/{self.job.id}",
        }


def compare(database: Database, baseline: int, candidate: int, *, limit: int | None = None) -> Sheet:
    """Compare two finished jobs of one kind. `Sheet.about` has both, and what differs between them.

    Args:
        database: the store.
        baseline: the job to compare with.
        candidate: the job that is compared.
        limit: the most rows of each table and phase of a profile, those that changed most; None: all.

    Raises:
        NotFound: there is no such job.
        Conflict: a job is not finished.
        InvalidRequest: the jobs are of different kinds.
    """
    with database.read() as connection:
        jobs = _finished(connection, [baseline, candidate])
        one, other = jobs[baseline], jobs[candidate]
        if one.kind != other.kind:
            kinds = f"job {baseline} is of kind {one.kind}, job {candidate} of kind {other.kind}"
            detail = f"Compare jobs of one kind: {kinds}."
            raise InvalidRequest(detail, errors=(FieldError("/candidate", detail),))
        measured = choosing.measurements(connection, list(jobs.values()), "median")
        of_units = choosing.sides(connection, list(jobs.values()))
    sides = []
    for name, job in zip(SIDES, (one, other), strict=True):
        rows = [row for row in measured if row.job_id == job.id]
        cases, metrics = cases_of([job], rows, lambda row: of_units.get((row.job_id, row.attempt, row.unit_index)))
        sides.append(_Side(name, job, cases, metrics, None))
    return _compared(database, sides[0], sides[1], alternated=False, limit=limit)


def compare_sides(database: Database, job_id: int, *, limit: int | None = None) -> Sheet:
    """Compare the sides of a finished job that has measured both in turns; as `compare`.

    Raises:
        NotFound: there is no such job.
        Conflict: the job is not finished.
        InvalidRequest: it is no comparison.
    """
    with database.read() as connection:
        jobs = _finished(connection, [job_id])
        job = jobs[job_id]
        if job.kind not in KINDS or not KINDS[job.kind].holds_specs:
            detail = f"Job {job_id} is of kind {job.kind}, no comparison: pass two jobs, as baseline and candidate."
            raise InvalidRequest(detail, errors=(FieldError("/job", detail),))
        measured = choosing.measurements(connection, [job], "median")
        of_units = choosing.sides(connection, [job])
    cases, metrics = cases_of([job], measured, lambda row: of_units.get((row.job_id, row.attempt, row.unit_index)))
    sides = [
        _Side(
            name,
            job,
            [case for case in cases if case.coordinates.get("side") == name],
            metrics,
            frozenset(unit for (_, _, unit), side in of_units.items() if side == name),
        )
        for name in SIDES
    ]
    return _compared(database, sides[0], sides[1], alternated=True, limit=limit)


def _finished(connection: Connection, wanted: Sequence[int]) -> dict[int, Row[Any]]:
    """Return these jobs by id.

    Raises:
        NotFound: there is no such job.
        Conflict: one is not finished.
    """
    chosen = choosing.choose_jobs(connection, kind=None, sweep=None, jobs=wanted, labels=())
    found = {job.id: job for job in chosen}
    for job_id in wanted:
        if job_id not in found:
            raise Conflict(f"Job {job_id} is not finished: wait for its end, then compare.")
    return found


def _compared(database: Database, baseline: _Side, candidate: _Side, *, alternated: bool, limit: int | None) -> Sheet:
    differences = _differences(baseline, candidate)
    notes = [ALTERNATED if alternated else NOT_ALTERNATED]
    if differences:
        notes.append(f"They differ in {case_text({name: _change(*both) for name, both in differences.items()})}.")
    for side in (baseline, candidate):
        if side.job.state != "succeeded":
            code = (side.job.error or {}).get("code", side.job.state)
            notes.append(f"The {side.name}, job {side.job.id}, did not succeed ({code}): it has no numbers.")
        elif side.validity not in (None, VERDICTS[0]):
            notes.append(f"The {side.name}, job {side.job.id}, is {side.validity}; its verdict says why.")
    tables = _Tables.read(database, baseline, candidate)
    if tables.joined:
        columns, rows = tables.compared(limit, notes)
    else:
        columns, rows = _metrics_compared(baseline, candidate, differences)
    about = {
        "alternated": alternated,
        "baseline": baseline.about(),
        "candidate": candidate.about(),
        "differences": [
            {"name": name, "baseline": one, "candidate": other} for name, (one, other) in differences.items()
        ],
        "notes": notes,
    }
    return Sheet(columns=columns, rows=rows, notes=notes, about=about)


def _change(one: Scalar, other: Scalar) -> str:
    return ARROW.join("none" if value is None else str(value) for value in (one, other))


def _differences(baseline: _Side, candidate: _Side) -> dict[str, tuple[Scalar, Scalar]]:
    """Return the coordinates that have one value on each side, and another one on the other side."""
    if not baseline.cases or not candidate.cases:
        return {}
    names = dict.fromkeys(name for side in (baseline, candidate) for case in side.cases for name in case.coordinates)
    found = {}
    for name in names:
        one, other = (
            {json.dumps(in_use(case.coordinates.get(name))) for case in side.cases} for side in (baseline, candidate)
        )
        if len(one) == len(other) == 1 and one != other and name != "side":
            found[name] = (baseline.cases[0].coordinates.get(name), candidate.cases[0].coordinates.get(name))
    return found


def _metrics_compared(
    baseline: _Side, candidate: _Side, differences: Mapping[str, Any]
) -> tuple[list[Column], list[list[Any]]]:
    """Return a row for each metric of each case: medians of both sides, and what the candidate gained or lost."""
    apart = {*differences, "side"}

    def joined(side: _Side) -> dict[str, CaseOfJob]:
        return {json.dumps(sorted(_known(case, apart))): case for case in side.cases}

    ones, others = joined(baseline), joined(candidate)
    keys = list(dict.fromkeys([*ones, *others]))
    either = {**others, **ones}
    shown = [name for name in coordinates_of([either[key] for key in keys], None) if name not in apart]
    metrics = {**candidate.metrics, **baseline.metrics}
    rows = []
    for key in keys:
        pair = (ones.get(key), others.get(key))
        place = [either[key].show(name) for name in shown]
        for metric in dict.fromkeys([*baseline.metrics, *candidate.metrics]):
            cells = [NOT_MEASURED if case is None else cell_of(case, metric, "median") for case in pair]
            if all(cell.value is None and cell.outcome in (None, "unknown") for cell in cells):
                continue
            rows.append([*place, metric, metrics[metric], *_metric_row(cells, pair)])
    return _metric_columns(shown, rows), rows


def _known(case: CaseOfJob, apart: Iterable[str]) -> list[tuple[str, Scalar]]:
    left_out = set(apart)
    used = {name: in_use(value) for name, value in case.coordinates.items() if name not in left_out}
    return [(name, value) for name, value in used.items() if value is not None]


def _metric_row(cells: Sequence[Cell], pair: Sequence[CaseOfJob | None]) -> list[Scalar]:
    one, other = cells
    change, ratio = _difference(one.value, other.value)
    keys = {case.key for case in pair if case is not None}
    verdicts = [None if case is None else case.validity() for case in pair]
    case_key = keys.pop() if len(keys) == 1 else None
    return [one.value, other.value, change, ratio, one.n, other.n, one.outcome, other.outcome, *verdicts, case_key]


def _metric_columns(shown: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Column]:
    first = len(shown)
    failed = any(outcome not in ("ok", None) for row in rows for outcome in row[first + 8 : first + 10])
    doubtful = any(verdict in VERDICTS[1:] for row in rows for verdict in row[first + 10 : first + 12])
    compared = [
        Column("metric", "string"),
        Column("unit", "string"),
        Column("baseline", "number"),
        Column("candidate", "number"),
        Column("change", "number"),
        Column("ratio", "number"),
        *(Column(f"{side}_n", "integer", in_text=False) for side in SIDES),
        *(Column(f"{side}_outcome", "string", in_text=failed) for side in SIDES),
        *(Column(f"{side}_validity", "string", in_text=doubtful) for side in SIDES),
        Column("case_key", "string", in_text=False),
    ]
    names = free_names(shown, {column.name for column in compared}, "case")
    types = [type_of(row[index] for row in rows) for index in range(first)]
    coordinates = [Column(names[name], type_, role="coordinate") for name, type_ in zip(shown, types, strict=True)]
    return [*coordinates, *compared]


def _difference(one: float | None, other: float | None) -> tuple[float | None, float | None]:
    """Return other - one and other / one, each None if unknown."""
    if one is None or other is None:
        return None, None
    return other - one, other / one if one else None


@dataclass
class _Rows:
    """The rows of one table that both sides reported, by what identifies them: ms and calls per step."""

    kind: str
    phase: str | None
    baseline: dict[Key, tuple[float, float | None]]
    candidate: dict[Key, tuple[float, float | None]]

    @property
    def title(self) -> str:
        """The table and its phase, for people."""
        return self.kind if self.phase is None else f"{self.kind} ({self.phase})"

    def compared(self) -> list[list[Scalar]]:
        """Return the table's rows, those that changed most first."""
        rows: list[tuple[float, list[Scalar]]] = []
        for key in dict.fromkeys([*self.baseline, *self.candidate]):
            *_, name, class_name = key
            (one, calls), (other, other_calls) = (
                side.get(key, (None, None)) for side in (self.baseline, self.candidate)
            )
            change, ratio = _difference(one, other)
            # All classes are listed: one that is missing could not be told. A kernel that is missing did not run.
            if self.kind != "classes":
                change = (other or 0.0) - (one or 0.0)
            place = (self.kind, self.phase, class_name if self.kind == "classes" else name)
            rows.append((abs(change or 0.0), [*place, class_name, one, other, change, ratio, calls, other_calls]))
        return [row for _, row in sorted(rows, key=lambda found: -found[0])]


@dataclass
class _Tables:
    """The tables of two profiles that can be compared."""

    joined: list[_Rows] = field(default_factory=list)
    of_one_side: dict[SideName, list[str]] = field(default_factory=lambda: {name: [] for name in SIDES})
    """What only one side has: names of tables, and scopes of classes."""

    @classmethod
    def read(cls, database: Database, baseline: _Side, candidate: _Side) -> _Tables:
        """Read the tables of both sides; none if one of the jobs has not succeeded."""
        found = cls()
        if any(side.job.state != "succeeded" for side in (baseline, candidate)):
            return found
        ones, others = (_names(database, side) for side in (baseline, candidate))
        for name in sorted({*ones, *others}, key=_place):
            if name not in ones or name not in others:
                found.of_one_side["baseline" if name in ones else "candidate"].append(name)
                continue
            sheets = [result_table(database, side.job.id, name) for side in (baseline, candidate)]
            for rows in _joined(name, sheets, [baseline.units, candidate.units]):
                found.add(rows)
        return found

    def add(self, rows: _Rows) -> None:
        """Take the rows of a table and phase. If one side has none at all, it has no such work to compare."""
        if rows.baseline and rows.candidate:
            self.joined.append(rows)
        elif rows.baseline or rows.candidate:
            self.of_one_side["baseline" if rows.baseline else "candidate"].append(rows.title)

    def compared(self, limit: int | None, notes: list[str]) -> tuple[list[Column], list[list[Scalar]]]:
        """Return the columns and the rows of all tables; what is left out goes to `notes`."""
        whole = [_total(rows) for rows in self.joined if rows.kind == "kernels"]
        whole = whole or [_total(rows) for rows in self.joined if rows.kind == "operators"]
        found: list[list[Scalar]] = list(whole)
        cut = []
        for rows in self.joined:
            compared = rows.compared()
            if limit is not None and len(compared) > limit:
                cut.append(f"{len(compared)} {rows.title}")
            found += compared[:limit]
        if cut:
            notes.append(f"Shown are the {limit} that changed most of {', '.join(cut)}.")
        notes += [f"Only the {side} has {', '.join(names)}." for side, names in self.of_one_side.items() if names]
        place = [Column(name, "string") for name in ("table", "phase", "name", "class")]
        return [*place, *DIFFERENCE], found


def _names(database: Database, side: _Side) -> list[str]:
    """Return the names of the side's tables that can be compared."""
    return [
        table["name"]
        for table in list_tables(database, side.job.id)
        if (needed := JOINED.get(table["name"].partition("-")[0])) is not None
        and {*needed} <= {column["name"] for column in table["columns"]}
        and (side.units is None or side.units & {*table["units"]})
    ]


def _place(name: str) -> tuple[int, int, str]:
    kind, _, phase = name.partition("-")
    return list(JOINED).index(kind), _order(phase), phase


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _joined(name: str, sheets: Sequence[Sheet], units: Sequence[frozenset[int] | None]) -> list[_Rows]:
    """Return the rows of one table, apart for each phase; a table of classes has several (`scope`)."""
    kind, _, phase = name.partition("-")
    time = next((time for time in TIMES if all(_has_values(sheet, time) for sheet in sheets)), None)
    if time is None:
        return []
    ones, others = (_by_key(sheet, JOINED[kind], time, of_side) for sheet, of_side in zip(sheets, units, strict=True))
    if kind != "classes":
        return [_Rows(kind, phase or None, ones, others)]
    scopes = sorted({str(key[0]) for key in (*ones, *others)}, key=_order)

    def inside(rows: Mapping[Key, Any], scope: str) -> dict[Key, Any]:
        return {key: row for key, row in rows.items() if str(key[0]) == scope}

    return [_Rows(kind, scope, inside(ones, scope), inside(others, scope)) for scope in scopes]


def _has_values(sheet: Sheet, column: str) -> bool:
    return column in sheet.names() and any(value is not None for value in sheet.column(column))


def _by_key(
    sheet: Sheet, identity: Sequence[str], time: str, units: frozenset[int] | None
) -> dict[Key, tuple[float, float | None]]:
    """Return time and calls of each row. If several processes measured them: means over the processes.

    A process whose table lacks a row did not run it.
    """
    names = sheet.names()
    at = {name: names.index(name) for name in (UNIT_INDEX, *identity, time)}
    calls_at = names.index(CALLS) if CALLS in names else None
    found: dict[Key, dict[int, tuple[float, float]]] = {}
    processes = set()
    for row in sheet.rows:
        unit = row[at[UNIT_INDEX]]
        if (units is not None and unit not in units) or row[at[time]] is None:
            continue
        processes.add(unit)
        calls = row[calls_at] if calls_at is not None else None
        of_unit = found.setdefault(tuple(row[at[name]] for name in identity), {})
        before = of_unit.get(unit, (0.0, 0.0))
        of_unit[unit] = (before[0] + row[at[time]], before[1] + (calls or 0.0))

    def mean(values: Callable[[tuple[float, float]], float], of_unit: Mapping[int, tuple[float, float]]) -> float:
        return statistics.fmean(values(of_unit.get(unit, (0.0, 0.0))) for unit in processes)

    return {
        key: (
            mean(lambda both: both[0], of_unit),
            None if calls_at is None else _whole(mean(lambda both: both[1], of_unit)),
        )
        for key, of_unit in found.items()
    }


def _whole(number: float) -> float:
    """Return a number of calls, as an integer if it is one."""
    return int(number) if number.is_integer() else number


def _total(rows: _Rows) -> list[Scalar]:
    """Return the row of a phase's whole work."""
    (one, calls), (other, other_calls) = (
        (sum(row[0] for row in side.values()), sum(row[1] or 0 for row in side.values()))
        for side in (rows.baseline, rows.candidate)
    )
    return ["total", rows.phase, f"all {rows.kind}", None, one, other, *_difference(one, other), calls, other_calls]
