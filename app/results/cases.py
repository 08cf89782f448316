"""Gathers measurements into cases, and makes the cells of tables from the processes that measured a case.

Within a job, measurements with the same case key and device key (and in a comparison the same side) are one case.

A cell has the value of one metric of a case (see app/summaries.py). Cases that a job did not reach before it ended
without success have its code ("timeout", "cancelled", …) as their outcome.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from app.columns import free_names
from app.metrics import column_name, is_rate
from app.results.arranging import RUN
from app.results.environments import VERSION, short_version, uploaded_version
from app.results.footnotes import Doubt, doubts_of
from app.results.sheet import NOT_MEASURED, Cell
from app.specs import Scalar, SpecBase, spec_adapter
from app.states import VERDICTS, worst
from app.store.database.engine import Snapshot
from app.store.reading import measurements
from app.store.reading.measurements import FinishedJob
from app.store.reading.packed import decoded
from app.summaries import add_process, planned_processes, summarise, worst_outcome
from flopwatch.table_options import Statistic

METRIC_SUFFIXES = ("", "_std", "_low", "_high", "_n", "_outcome", "_job", "_validity", "_speedup", "_gain", "_ratio")
OF_THE_JOB = ("job", "kind", "case_key")
RESERVED = (*OF_THE_JOB, "device", "side", VERSION, "validity", "validity_reason", "partial", RUN)
"""Columns of tables. A coordinate of a case with such a name becomes the column "case.<name>"."""

Measured = measurements.Measured | SimpleNamespace
"""A measurement, from the database or from `flopwatch run`."""


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
        """Add a process's measurement."""
        rows = self.processes.get(metric)
        if rows is None:
            self.processes[metric] = [row]
        else:
            add_process(rows, row)

    def show(self, name: str) -> Scalar:
        if name not in OF_THE_JOB:
            return self.coordinates.get(name)
        return self.job if name == "job" else self.kind if name == "kind" else self.key

    def outcome(self, metric: str) -> str:
        return worst_outcome(self.processes[metric])

    @property
    def partial(self) -> bool:
        """True if a part of it was measured, although the job did not succeed."""
        return self.stopped is not None and bool(self.processes)

    def validity(self) -> str | None:
        """Return the worst verdict of the case's processes."""
        verdicts = {row.validity for rows in self.processes.values() for row in rows}
        if len(verdicts) == 1:
            (only,) = verdicts
            return only if only in VERDICTS else None
        return worst(verdicts)


@dataclass(frozen=True)
class MeasuredJobs:
    """The jobs of a table with their measurements."""

    jobs: Sequence[FinishedJob]
    measured: Sequence[Measured]
    sides: Mapping[tuple[int, int, int], str]
    verdicts: Mapping[tuple[int, int], Mapping[str, Any]]

    @classmethod
    def read(
        cls,
        snapshot: Snapshot,
        jobs: Sequence[FinishedJob],
        statistic: Statistic,
        measured: Sequence[measurements.Measured] | None = None,
    ) -> MeasuredJobs:
        """Read what belongs to these jobs, and their measurements, unless those are given."""
        if measured is None:
            measured = measurements.measurements(snapshot, jobs, statistic)
        doubtful = {row.job_id: row.attempt for row in measured if row.validity in VERDICTS[1:]}
        verdicts = measurements.unit_verdicts(snapshot, doubtful)
        return cls(jobs, measured, measurements.sides(snapshot, jobs), verdicts)

    def cases(self) -> tuple[list[CaseOfJob], dict[str, str]]:
        """Return the cases, and the unit of each metric's column."""

        def side(row: Measured) -> str | None:
            return self.sides.get((row.job_id, row.attempt, row.unit_index))

        return cases_of(self.jobs, self.measured, side if self.sides else None)

    def why(self, case: CaseOfJob) -> Sequence[Doubt]:
        """Return why a case is not valid."""
        units = {(row.job_id, row.unit_index) for rows in case.processes.values() for row in rows}
        return [doubt for unit in sorted(units) for doubt in doubts_of(self.verdicts.get(unit), case.key)]


class StoredCases:
    """The coordinates of stored cases. Each stored text is read once: all metrics of a case have the same, and so have
    the jobs of a sweep that measured one case."""

    def __init__(self, metrics: Iterable[str], cases: Iterable[str | Mapping[str, Scalar]]) -> None:
        taken = {*RESERVED, *(name + suffix for name in metrics for suffix in METRIC_SUFFIXES)}
        """The names that no coordinate can have, with these metrics in the table."""
        texts = list(dict.fromkeys(case for case in cases if isinstance(case, str)))
        self._decoded = dict(zip(texts, map(_coordinates, decoded(texts)), strict=True))
        self._known: dict[tuple[str, str, str | None], Mapping[str, Scalar]] = {}
        self._columns = functools.cache(lambda names: free_names(names, taken, "case"))

    def coordinates(self, case: str | Mapping[str, Scalar], device: str, side: str | None) -> Mapping[str, Scalar]:
        """Return the coordinates of a case by the names of their columns, with side and device."""
        if not isinstance(case, str):
            return {**_of_side(side), **self.renamed(case), "device": device}
        if (identity := (case, device, side)) not in self._known:
            self._known[identity] = self.coordinates(self._decoded[case], device, side)
        return self._known[identity]

    def renamed(self, coordinates: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return coordinates by the names of their columns."""
        return dict(zip(self._columns(tuple(coordinates)).values(), coordinates.values(), strict=True))


def cases_of(
    jobs: Sequence[FinishedJob], measured: Sequence[Measured], side: Callable[[Any], str | None] | None = None
) -> tuple[list[CaseOfJob], dict[str, str]]:
    """Return the rows of the table, and the unit of each metric's column. `side` tells a measurement's side of a
    comparison; None where there are no comparisons."""
    units: dict[str, str] = {}
    by_job: dict[int, list[tuple[str, Measured]]] = {job.id: [] for job in jobs}
    for row in measured:
        name = column_name(row.metric, row.phase)
        units[name] = row.unit
        by_job[row.job_id].append((name, row))
    stored = StoredCases(units, (row.case for row in measured))
    cases: list[CaseOfJob] = []
    for job in jobs:
        about: dict[str, Any] = {
            "job": job.id,
            "kind": job.kind,
            "tabled_as": _tabled_as(job),
            "stopped": job.stopped,
            "planned_processes": planned_processes(job.spec),
        }
        of_job: dict[tuple[str, str, str | None], CaseOfJob] = {}
        for name, row in by_job[job.id]:
            of_side = None if side is None else side(row)
            identity = (row.case_key, row.device_key, of_side)
            case = of_job.get(identity)
            if case is None:
                coordinates = stored.coordinates(row.case, row.device_key, of_side)
                spec = job.spec if of_side is None else job.spec.get(of_side, {})
                if (version := uploaded_version(spec, coordinates)) is not None:
                    coordinates = {**coordinates, VERSION: short_version(version)}
                case = of_job[identity] = CaseOfJob(coordinates=coordinates, key=row.case_key, **about)
            case.add(name, row)
        if job.stopped is not None and job.has_sides:  # the sides of a comparison keep what was measured
            for case in of_job.values():
                reached = max(map(len, case.processes.values()))
                case.planned_processes = min(case.planned_processes, reached)
        # The first of the drawn turns may be the candidate's.
        cases += sorted(of_job.values(), key=lambda case: str(case.coordinates.get("side", "")))
        if job.stopped is not None:
            measured_keys = {key for key, _, _ in of_job}
            cases += [
                CaseOfJob(key=key, coordinates=coordinates, **about)
                for key, coordinates in _unreached(job, measured_keys, stored)
            ]
    return cases, units


def _unreached(
    job: FinishedJob, measured: Collection[str], stored: StoredCases
) -> Iterable[tuple[str | None, Mapping[str, Scalar]]]:
    """Return key and coordinates of the cases that a job did not reach. For a job that measured nothing, this is an
    overview of all its cases, one entry per side. Nothing is known if the spec is of another version and no longer
    valid."""
    if not measured:
        return [(None, overview) for overview in _planned(job, stored)]
    plan = _plan(job)
    if plan is None or plan.has_sides:
        return []
    unreached = [(case.key, stored.renamed(case.coordinates)) for case in plan.cases() if case.key not in measured]
    # If the keys of the measured cases differ from the planned ones, the remaining cases are unknown.
    return unreached if len(unreached) + len(measured) == plan.number_of_cells() else []


def _coordinates(case: Any) -> dict[str, Scalar]:
    """Return a decoded case's coordinates; none when they cannot be read, and the case's numbers stand alone."""
    return case if isinstance(case, dict) else {}


def _of_side(side: str | None) -> dict[str, Scalar]:
    return {} if side is None else {"side": side}


def _tabled_as(job: FinishedJob) -> tuple[str, ...]:
    if not job.has_sides:
        return (job.kind,)
    held = [value["kind"] for value in job.spec.values() if isinstance(value, dict) and "kind" in value]
    return (job.kind, *dict.fromkeys(held))


def _plan(job: FinishedJob) -> SpecBase | None:
    try:
        return spec_adapter.validate_json(json.dumps(job.spec))
    except ValidationError:
        return None


def _planned(job: FinishedJob, stored: StoredCases) -> list[dict[str, Scalar]]:
    """Return the known coordinates of a job that measured nothing: its overview, one per side. Nothing is known when
    the spec is of another version and no longer valid."""
    plan = _plan(job)
    if plan is None:
        return [{}]
    if not plan.has_sides:
        return [stored.renamed(plan.overview())]
    held = {name: getattr(plan, name) for name in type(plan).model_fields}
    return [
        {**_of_side(side), **stored.renamed(inner.overview())}
        for side, inner in held.items()
        if isinstance(inner, SpecBase)
    ]


def cell_of(case: CaseOfJob, metric: str, statistic: Statistic) -> Cell:
    """Return the cell of a metric, named as its column, of a case."""
    rows: Sequence[Measured] = case.processes.get(metric, ())
    rate = bool(rows) and is_rate(metric, rows[0].unit)
    summary = summarise(rows, case.planned_processes, case.stopped, statistic, rate=rate)
    if summary.outcome is None:
        return NOT_MEASURED
    return Cell(
        summary.value,
        summary.spread,
        summary.n,
        summary.outcome,
        case.job,
        low=summary.low,
        high=summary.high,
        least=summary.least,
        greatest=summary.greatest,
    )
