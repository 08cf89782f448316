"""Gathers measurements into cases, and computes the cells of tables from the processes that measured a case.

Within a job, measurements with the same case key and device key (and in a comparison the same side) are one case.

A cell is the mean of its samples with their standard deviation, or another statistic of them. If several processes
(units of the job) measured a case, each process counts as one value: the cell is the statistic of the processes' own
statistics, such as the median of their medians, and the standard deviation is that of their means. No average hides a
missing value: when one process has no value, the cell has an outcome instead ("oom", "unsupported", …) and its numbers
are null. If a job did not succeed, cells that all processes measured are shown and marked partial; the other cells, and
the cases that the job did not reach, have the job's code ("timeout", "cancelled", …) as their outcome.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Row

from app.results.arranging import RUN
from app.results.footnotes import Doubt, doubts_of
from app.results.sheet import NOT_MEASURED, Cell, free_names
from app.specs import KINDS, Scalar, SpecBase, spec_adapter
from app.states import VERDICTS, worst
from app.store.public import finite
from app.store.reading import measurements
from app.store.reading.packed import decoded
from app.table_options import Statistic

METRIC_SUFFIXES = ("", "_std", "_n", "_outcome", "_job", "_validity", "_speedup", "_gain", "_ratio")
OF_THE_JOB = ("job", "kind", "case_key")
RESERVED = (*OF_THE_JOB, "device", "side", "validity", "validity_reason", "partial", RUN)
"""Columns of tables. A coordinate of a case with such a name becomes the column "case.<name>"."""

Job = Row[Any] | SimpleNamespace
Measured = measurements.Measured | SimpleNamespace
"""A job and a measurement, from the database or from `flopwatch run`."""


@dataclass(slots=True)
class CaseOfJob:
    """One row: a case of a job. `stopped` says why there are no numbers when the job did not succeed."""

    job: int | None
    kind: str
    tabled_as: tuple[str, ...]
    """The kinds whose rows and columns the table shows; in a comparison, the kind of its sides too."""
    coordinates: Mapping[str, Scalar]
    """Cases of several jobs may share one mapping."""
    key: str | None = None
    stopped: str | None = None
    planned_processes: int = 1
    """The number of processes that were planned to measure the case."""
    processes: dict[str, list[Measured]] = field(default_factory=dict)
    """The processes' measurements by column: one row per unit."""

    def add(self, metric: str, row: Measured) -> None:
        """Add a process's measurement. A crash may leave two rows of one unit: the first that is "ok" counts.

        Each row without a unit counts as a process of its own.
        """
        rows = self.processes.get(metric)
        if rows is None:
            self.processes[metric] = [row]
            return
        for index, former in enumerate(rows):
            if row.unit_index is not None and former.unit_index == row.unit_index:
                if former.outcome != "ok" and row.outcome == "ok":
                    rows[index] = row
                return
        rows.append(row)

    def show(self, name: str) -> Scalar:
        if name not in OF_THE_JOB:
            return self.coordinates.get(name)
        return self.job if name == "job" else self.kind if name == "kind" else self.key

    def outcome(self, metric: str) -> str:
        for row in self.processes[metric]:
            if row.outcome != "ok":
                return str(row.outcome)
        return "ok"

    @property
    def partial(self) -> bool:
        """True if a part of it was measured, although the job did not succeed."""
        return self.stopped is not None and bool(self.processes)

    def validity(self) -> str | None:
        """Return the worst verdict of the case's processes."""
        found = {row.validity for rows in self.processes.values() for row in rows}
        if len(found) == 1:
            (only,) = found
            return only if only in VERDICTS else None
        return worst(found)


@functools.cache
def column_name(metric: str, phase: str | None) -> str:
    """Return the name of a metric's column, which depends on nothing else: `forward_ms`, `forward_tflops`, `tflops`."""
    return metric if phase is None or metric.startswith(f"{phase}_") else f"{phase}_{metric}"


def metric_names(column: str) -> set[str]:
    """Return the metrics that may have this column: `forward_tflops` is one by itself, or `tflops` of phase forward."""
    words = column.split("_")
    return {"_".join(words[start:]) for start in range(len(words))}


@dataclass(frozen=True)
class Part:
    """Some jobs with their measurements: all of a table, or a part of one that is streamed."""

    jobs: Sequence[Job]
    measured: Sequence[Measured]
    sides: Mapping[tuple[int, int, int], str]
    verdicts: Mapping[tuple[int, int], Mapping[str, Any]]

    @classmethod
    def read(
        cls,
        connection: Connection,
        jobs: Sequence[Row[Any]],
        statistic: Statistic,
        measured: Sequence[measurements.Measured] | None = None,
    ) -> Part:
        """Read what belongs to these jobs, and their measurements, unless those are given."""
        if measured is None:
            measured = measurements.measurements(connection, jobs, statistic)
        doubtful = {row.job_id: row.attempt for row in measured if row.validity in VERDICTS[1:]}
        verdicts = measurements.unit_verdicts(connection, doubtful)
        return cls(jobs, measured, measurements.sides(connection, jobs), verdicts)

    def cases(self, units: Mapping[str, str] | None = None) -> tuple[list[CaseOfJob], dict[str, str]]:
        """Return the cases, and the unit of each metric's column; `units` has those of columns that are not here."""

        def side(row: Measured) -> str | None:
            return self.sides.get((row.job_id, row.attempt, row.unit_index))

        return cases_of(self.jobs, self.measured, side if self.sides else None, units)

    def why(self, case: CaseOfJob) -> Sequence[Doubt]:
        """Return why a case is not valid."""
        units = {(row.job_id, row.unit_index) for found in case.processes.values() for row in found}
        return [doubt for unit in sorted(units) for doubt in doubts_of(self.verdicts.get(unit), case.key)]


class StoredCases:
    """Reads the coordinates of cases. Each stored text is read once: all metrics of a case have the same, and so have
    the jobs of a sweep that measured one case.
    """

    def __init__(self, metrics: Iterable[str]) -> None:
        self.taken = {*RESERVED, *(name + suffix for name in metrics for suffix in METRIC_SUFFIXES)}
        """The names that no coordinate can have, with these metrics in the table."""
        self._known: dict[tuple[str, str, str | None], Mapping[str, Scalar]] = {}
        self._decoded: dict[str, Mapping[str, Scalar]] = {}
        self._columns: dict[tuple[str, ...], Mapping[str, str]] = {}

    def decode(self, cases: Iterable[str | Mapping[str, Scalar]]) -> None:
        """Decode the texts of many cases at once, which takes less time than each when it is asked for."""
        texts = list(dict.fromkeys(case for case in cases if isinstance(case, str)))
        self._decoded |= zip(texts, map(_coordinates, decoded(texts)), strict=True)

    def coordinates(self, case: str | Mapping[str, Scalar], device: str, side: str | None) -> Mapping[str, Scalar]:
        """Return the coordinates of a case by the names of their columns, with side and device."""
        if not isinstance(case, str):
            return self._shown(case, device, side)
        identity = (case, device, side)
        found = self._known.get(identity)
        if found is None:
            found = self._known[identity] = self._shown(self._stored(case), device, side)
        return found

    def _stored(self, case: str) -> Mapping[str, Scalar]:
        if case not in self._decoded:
            self.decode([case])
        return self._decoded[case]

    def _shown(self, case: Mapping[str, Scalar], device: str, side: str | None) -> dict[str, Scalar]:
        return {**_of_side(side), **self.renamed(case), "device": device}

    def renamed(self, coordinates: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return coordinates by the names of their columns."""
        given = tuple(coordinates)
        columns = self._columns.get(given)
        if columns is None:
            columns = self._columns[given] = free_names(given, self.taken, "case")
        return dict(zip(columns.values(), coordinates.values(), strict=True))


def cases_of(
    jobs: Sequence[Job],
    measured: Sequence[Measured],
    side: Callable[[Any], str | None] | None = None,
    units: Mapping[str, str] | None = None,
) -> tuple[list[CaseOfJob], dict[str, str]]:
    """Return the rows of the table, and the unit of each metric's column.

    Args:
        jobs: the jobs.
        measured: their measurements, in the order in which they were made.
        side: tells a measurement's side of a comparison; None where there are no comparisons.
        units: those of all columns of the table, if `measured` is only a part of it.
    """
    units = dict(units or {})
    by_job: dict[int | None, list[tuple[str, Measured]]] = {job.id: [] for job in jobs}
    for row in measured:
        name = column_name(row.metric, row.phase)
        units[name] = row.unit
        by_job[row.job_id].append((name, row))
    stored = StoredCases(units)
    stored.decode(row.case for row in measured)
    cases: list[CaseOfJob] = []
    for job in jobs:
        about = {"job": job.id, "kind": job.kind, "tabled_as": _tabled_as(job)}
        about["stopped"] = None if job.state == "succeeded" else (job.error or {}).get("code", job.state)
        about["planned_processes"] = planned_processes(job.spec)
        found: dict[tuple[str, str, str | None], CaseOfJob] = {}
        for name, row in by_job[job.id]:
            of_side = None if side is None else side(row)
            identity = (row.case_key, row.device_key, of_side)
            case = found.get(identity)
            if case is None:
                coordinates = stored.coordinates(row.case, row.device_key, of_side)
                case = found[identity] = CaseOfJob(coordinates=coordinates, key=row.case_key, **about)
            case.add(name, row)
        cases += found.values()
        if about["stopped"] is not None:
            measured_keys = {key for key, _, _ in found}
            cases += [CaseOfJob(key=key, coordinates=left, **about) for key, left in _left(job, measured_keys, stored)]
    return cases, units


def planned_processes(spec: Any) -> int:
    """Return how many processes measure a case of a stored spec."""
    replicates = spec.get("replicates") if isinstance(spec, dict) else None
    return replicates if isinstance(replicates, int) else 1


def _left(
    job: Job, measured: Collection[str], stored: StoredCases
) -> Iterable[tuple[str | None, Mapping[str, Scalar]]]:
    """Return key and coordinates of the cases that a job did not reach.

    For a job that measured nothing, this is an overview of all its cases, one entry per side. Nothing is known if the
    spec is of another version and no longer valid.
    """
    if not measured:
        return [(None, overview) for overview in planned(json.dumps(job.spec), stored)]
    plan = _plan(json.dumps(job.spec))
    if plan is None or plan.holds_specs:
        return []
    left = [(case.key, stored.renamed(case.coordinates)) for case in plan.cases() if case.key not in measured]
    # If the keys of the measured cases differ from the planned ones, nobody can tell which cases are left.
    return left if len(left) + len(measured) == plan.number_of_cells() else []


def _coordinates(case: Any) -> dict[str, Scalar]:
    """Return a decoded case's coordinates; none when they cannot be read, and the case's numbers stand alone."""
    return case if isinstance(case, dict) else {}


def _of_side(side: str | None) -> dict[str, Scalar]:
    return {} if side is None else {"side": side}


def _tabled_as(job: Job) -> tuple[str, ...]:
    if job.kind not in KINDS or not KINDS[job.kind].holds_specs:
        return (job.kind,)
    held = [value["kind"] for value in job.spec.values() if isinstance(value, dict) and "kind" in value]
    return (job.kind, *dict.fromkeys(held))


def _plan(spec: str) -> SpecBase | None:
    """Return a stored spec; None if it is of another version and no longer valid."""
    try:
        return spec_adapter.validate_json(spec)
    except ValidationError:
        return None


def planned(spec: str, stored: StoredCases) -> list[dict[str, Scalar]]:
    """Return the known coordinates of a job that measured nothing: its overview, one per side. `spec` is JSON text.

    Nothing is known when the spec is of another version and no longer valid.
    """
    plan = _plan(spec)
    if plan is None:
        return [{}]
    if not plan.holds_specs:
        return [stored.renamed(plan.overview())]
    held = {name: getattr(plan, name) for name in type(plan).model_fields}
    return [
        {**_of_side(side), **stored.renamed(inner.overview())}
        for side, inner in held.items()
        if isinstance(inner, SpecBase)
    ]


def cell_of(case: CaseOfJob, metric: str, statistic: Statistic, *, partial: bool = False) -> Cell:
    """Return the cell of a metric, computed from the case's processes.

    Args:
        case: the case.
        metric: the name of its column.
        statistic: statistic of the samples, and of the processes if there are several.
        partial: if the job did not succeed, show cells that all planned processes measured; otherwise they have no
            numbers.
    """
    rows = case.processes.get(metric)
    if case.stopped is not None and (
        not partial or rows is None or lacks_processes([row.outcome for row in rows], case.planned_processes)
    ):
        return Cell(None, None, None, case.stopped, case.job)
    if rows is None:
        return NOT_MEASURED
    if len(rows) == 1 and rows[0].outcome == "ok":  # nearly always
        row = rows[0]
        return Cell(finite(row.value), finite(row.std) if statistic == "mean" else None, row.n, "ok", case.job)
    if (outcome := case.outcome(metric)) != "ok":
        return Cell(None, None, None, outcome, case.job)
    values = [finite(row.value) for row in rows]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Cell(None, None, len(values), "ok", case.job)
    spread = finite(statistics.stdev(known)) if statistic == "mean" else None
    return Cell(finite(_STATISTICS[statistic](known)), spread, len(known), "ok", case.job)


def lacks_processes(outcomes: Sequence[str], planned: int) -> bool:
    """Return True if processes that were to measure it did not get to it. An outcome such as oom is one already."""
    return len(outcomes) < planned and all(outcome == "ok" for outcome in outcomes)


def _quantile(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: statistics.quantiles(values, n=20, method="inclusive")[percent // 5 - 1]


_STATISTICS: dict[Statistic, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "p05": _quantile(5),
    "p25": _quantile(25),
    "p75": _quantile(75),
    "p95": _quantile(95),
}
