"""Tables of measurements: one row per case of a job, one column per metric.

Within a job, measurements with one case key and one device key (and in a comparison one side) share a row. Rows show
the coordinates that a kind asks for (`table_rows`), then every other one that varies, except those that a shown label
stands for. If two rows still look the same, they also show the coordinates in which they differ.

A cell is the mean of its samples with their standard deviation, or another statistic of them. If several processes
(units of the job) measured a case, each process counts as one value: the cell is the statistic of the processes' own
statistics, such as the median of their medians, and the standard deviation is that of their means. No average hides a
missing value: when one process has no value, or the job did not succeed, the cell has an outcome instead ("oom",
"unsupported", "timeout", …) and its numbers are null.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row

from app.errors import FieldError, InvalidRequest
from app.layout import Statistic, in_use
from app.specs import KINDS, Scalar, SpecBase, spec_adapter
from app.states import VERDICTS
from app.store.engine import Database
from app.store.public import finite
from app.store.results import choosing
from app.store.results.reasons import Gap, reasons
from app.store.results.sheet import NOT_MEASURED, Cell, Column, Sheet, free_names, type_of

UNKNOWN = "unknown"
EVERY_METRIC = "all"
METRIC_SUFFIXES = ("", "_std", "_n", "_outcome")
OF_THE_JOB = ("job", "kind", "case_key")
RESERVED = (*OF_THE_JOB, "device", "side", "validity")
"""Columns of tables. A coordinate of a case with such a name becomes the column "case.<name>"."""

_Row = Row[Any] | SimpleNamespace
"""A job or a measurement, from the database or from `flopwatch run`."""


@dataclass
class CaseOfJob:
    """One row: a case of a job. `stopped` says why there are no numbers when the job did not succeed."""

    job: int | None
    kind: str
    tabled_as: tuple[str, ...]
    """The kinds whose rows and columns the table shows; in a comparison, the kind of its sides too."""
    coordinates: dict[str, Scalar]
    key: str | None = None
    stopped: str | None = None
    processes: dict[str, list[_Row]] = field(default_factory=dict)
    """The processes' measurements by column: one row per unit."""

    def add(self, metric: str, row: _Row) -> None:
        """Add a process's measurement. A crash may leave two rows of one unit: the first that is "ok" counts.

        Each row without a unit counts as a process of its own.
        """
        rows = self.processes.setdefault(metric, [])
        for index, former in enumerate(rows):
            if row.unit_index is not None and former.unit_index == row.unit_index:
                if former.outcome != "ok" and row.outcome == "ok":
                    rows[index] = row
                return
        rows.append(row)

    def show(self, name: str) -> Scalar:
        if name in OF_THE_JOB:
            return {"job": self.job, "kind": self.kind, "case_key": self.key}[name]
        return self.coordinates.get(name)

    def outcome(self, metric: str) -> str:
        return next((row.outcome for row in self.processes[metric] if row.outcome != "ok"), "ok")

    def validity(self) -> str | None:
        """Return the worst verdict of the case's processes."""
        found = {row.validity for rows in self.processes.values() for row in rows}
        return next((verdict for verdict in reversed(VERDICTS) if verdict in found), None)


@functools.cache
def column_name(metric: str, phase: str | None) -> str:
    """Return the name of a metric's column, which depends on nothing else: `forward_ms`, `forward_tflops`, `tflops`."""
    return metric if phase is None or metric.startswith(f"{phase}_") else f"{phase}_{metric}"


def table(
    database: Database,
    *,
    kind: str | None = None,
    sweep: int | None = None,
    jobs: Collection[int] = (),
    labels: choosing.Labels = (),
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    statistic: Statistic = "mean",
    first: int | None = None,
) -> Sheet:
    """Return the results of finished jobs, in submission order. `kind`, `sweep`, `jobs` and `labels` narrow the choice.

    Args:
        database: the store.
        kind: jobs of this kind.
        sweep: jobs of this sweep, only the latest job of each point.
        jobs: these jobs.
        labels: jobs with all of these (key, value) pairs.
        rows: coordinates to show first, and always; those that vary follow.
        columns: metrics, named as their columns, in this order; "all" for every one. By default the kind's
            `table_columns` that somebody has measured.
        statistic: statistic of the samples, and of the processes if there are several.
        first: only the beginning of the table: at most so many rows, and fewer if they have very many measurements;
            `Sheet.is_cut` tells if there are more. None: the whole table.

    Raises:
        NotFound: there is no such job or sweep.
        InvalidRequest: no row has this coordinate or metric, the jobs are more than choosing.MAX_JOBS, or their
            measurements more than choosing.MAX_MEASUREMENTS.
    """
    is_cut = False
    with database.read() as connection:
        number = None if first is None else first + 1
        chosen = choosing.choose_jobs(connection, kind=kind, sweep=sweep, jobs=jobs, labels=labels, first=number)
        if first is None:
            measured = choosing.measurements(connection, chosen, statistic)
        else:
            chosen, measured, is_cut = choosing.first_measurements(connection, chosen, statistic)
        sides = choosing.sides(connection, chosen)

    def side(row: _Row) -> str | None:
        return sides.get((row.job_id, row.attempt, row.unit_index))

    cases, units = cases_of(chosen, measured, side)
    if first is not None:
        cases, is_cut = cases[:first], is_cut or len(cases) > first
    return replace(_sheet(cases, units, rows, columns, statistic), is_cut=is_cut)


def local_table(spec: SpecBase, measurements: Iterable[Mapping[str, Any]]) -> Sheet:
    """Return the table of one job that is in no database, with the reasons for missing numbers (`Sheet.missing`).

    Args:
        spec: the job's spec.
        measurements: as on the wire (Measurement.to_wire). Each may have "validity", its case's verdict, and in a
            comparison "side".
    """
    job = SimpleNamespace(id=None, kind=spec.kind, state="succeeded", spec=spec.model_dump(mode="json"), error=None)
    optional: dict[str, Any] = {"side": None, "validity": None, "unit_index": None}
    rows = [SimpleNamespace(**{**optional, **row, "job_id": None, "value": row["mean"]}) for row in measurements]
    return _sheet(*cases_of([job], rows, lambda row: row.side), None, None, "mean")


def cases_of(
    jobs: Sequence[_Row], measured: Sequence[_Row], side: Callable[[_Row], str | None]
) -> tuple[list[CaseOfJob], dict[str, str]]:
    """Return the rows of the table, and the unit of each metric's column."""
    units = {column_name(row.metric, row.phase): row.unit for row in measured}
    taken = {*RESERVED, *(unit + suffix for unit in units for suffix in METRIC_SUFFIXES)}
    by_job: dict[int | None, list[_Row]] = {job.id: [] for job in jobs}
    for row in measured:
        by_job[row.job_id].append(row)
    cases: list[CaseOfJob] = []
    for job in jobs:
        about = {"job": job.id, "kind": job.kind, "tabled_as": _tabled_as(job)}
        about["stopped"] = None if job.state == "succeeded" else (job.error or {}).get("code", job.state)
        found: dict[tuple[str, str, str | None], CaseOfJob] = {}
        for row in by_job[job.id]:
            of_side = side(row)
            identity = (row.case_key, row.device_key, of_side)
            if identity not in found:
                case = _stored_case(row.case) if isinstance(row.case, str) else row.case
                coordinates = {**_of_side(of_side), **_renamed(case, taken), "device": row.device_key}
                found[identity] = CaseOfJob(coordinates=coordinates, key=row.case_key, **about)
            found[identity].add(column_name(row.metric, row.phase), row)
        cases += found.values()
        if not found and about["stopped"] is not None:
            cases += [CaseOfJob(coordinates=planned, **about) for planned in _planned(job.spec, taken)]
    return cases, units


def _stored_case(stored: str) -> dict[str, Scalar]:
    """Return a case's coordinates; none when they cannot be read, and the case's numbers stand alone."""
    try:
        case = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    return case if isinstance(case, dict) else {}


def _of_side(side: str | None) -> dict[str, Scalar]:
    return {} if side is None else {"side": side}


def _renamed(coordinates: Mapping[str, Scalar], taken: Collection[str]) -> dict[str, Scalar]:
    names = free_names(coordinates, taken, "case")
    return {names[name]: value for name, value in coordinates.items()}


def _tabled_as(job: _Row) -> tuple[str, ...]:
    if job.kind not in KINDS or not KINDS[job.kind].holds_specs:
        return (job.kind,)
    held = [value["kind"] for value in job.spec.values() if isinstance(value, dict) and "kind" in value]
    return (job.kind, *dict.fromkeys(held))


def _planned(spec: dict[str, Any], taken: Collection[str]) -> list[dict[str, Scalar]]:
    """Return the known coordinates of a job that measured nothing: its overview, one per side.

    Nothing is known when the spec is of another version and no longer valid.
    """
    try:
        plan = spec_adapter.validate_json(json.dumps(spec))
    except ValidationError:
        return [{}]
    if not plan.holds_specs:
        return [_renamed(plan.overview(), taken)]
    held = {name: getattr(plan, name) for name in type(plan).model_fields}
    return [
        {**_of_side(side), **_renamed(inner.overview(), taken)}
        for side, inner in held.items()
        if isinstance(inner, SpecBase)
    ]


def _sheet(
    cases: Sequence[CaseOfJob],
    units: Mapping[str, str],
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    statistic: Statistic,
) -> Sheet:
    coordinates = coordinates_of(cases, rows)
    metrics = _metrics(cases, units, columns)
    values = [[case.show(name) for name in coordinates] for case in cases]
    verdicts = [case.validity() for case in cases]
    is_doubtful = any(verdict in VERDICTS[1:] for verdict in verdicts)
    described = [
        *(
            Column(name, type_of(row[index] for row in values), role="coordinate")
            for index, name in enumerate(coordinates)
        ),
        *(Column(name, "number", units.get(name), role="metric") for name in metrics),
        *([Column("validity", "string", in_text=is_doubtful)] if cases else []),
    ]
    return Sheet(
        columns=described,
        rows=[
            [*shown, *(cell_of(case, metric, statistic) for metric in metrics), verdict]
            for case, shown, verdict in zip(cases, values, verdicts, strict=True)
        ],
        missing=_missing(cases, coordinates, {*metrics, *(() if columns else _table_columns(cases))}),
        spreads=statistic == "mean",
    )


def cell_of(case: CaseOfJob, metric: str, statistic: Statistic) -> Cell:
    if case.stopped is not None:
        return Cell(None, None, None, case.stopped)
    if metric not in case.processes:
        return NOT_MEASURED
    if (outcome := case.outcome(metric)) != "ok":
        return Cell(None, None, None, outcome)
    processes = case.processes[metric]
    if len(processes) == 1:
        spread = finite(processes[0].std) if statistic == "mean" else None
        return Cell(finite(processes[0].value), spread, processes[0].n, "ok")
    values = [finite(row.value) for row in processes]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Cell(None, None, len(values), "ok")
    spread = finite(statistics.stdev(known)) if statistic == "mean" else None
    return Cell(finite(_STATISTICS[statistic](known)), spread, len(known), "ok")


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


def coordinates_of(cases: Sequence[CaseOfJob], asked: Sequence[str] | None) -> list[str]:
    """Return the coordinates that the rows show."""
    known = list(dict.fromkeys(name for case in cases for name in case.coordinates))
    if asked is None:
        preferred = [name for kind in _kinds(cases) for name in KINDS[kind].table_rows]
        chosen = [name for name in dict.fromkeys(preferred) if name in known]
        if len({case.kind for case in cases}) > 1:
            chosen.insert(0, "kind")
    else:
        _refuse_unknown("rows", asked, [*known, *OF_THE_JOB], there_is_something=bool(cases))
        chosen = list(dict.fromkeys(asked))
    varying = [name for name in known if name not in chosen and _varies(cases, name)]
    hidden = _stood_for(cases, chosen)
    chosen += [name for name in varying if name not in hidden]
    _tell_apart(cases, chosen, [*(name for name in varying if name in hidden), "job", "case_key"])
    return chosen


def _varies(cases: Sequence[CaseOfJob], name: str) -> bool:
    # A job that measured nothing lacks some of its case's columns (the device, for one); that is no difference.
    values = (in_use(case.coordinates.get(name)) for case in cases if case.processes or name in case.coordinates)
    first = next(values, None)
    # The types count too: Python takes 1 and true for equal.
    return any(value != first or type(value) is not type(first) for value in values)


def _stood_for(cases: Sequence[CaseOfJob], shown: Collection[str]) -> set[str]:
    """Return the coordinates that a shown label stands for, in every case that has them."""
    labels = [item for kind in _kinds(cases) for item in KINDS[kind].labels.items() if item[0] in shown]
    return {
        name
        for label, names in labels
        for name in names
        if all(label in case.coordinates for case in cases if name in case.coordinates)
    }


def _tell_apart(cases: Sequence[CaseOfJob], chosen: list[str], more: Iterable[str]) -> None:
    """Add to `chosen`, in place, the coordinates of `more` that differ between rows that look the same."""
    for name in more:
        alike: dict[str, list[CaseOfJob]] = {}
        for case in cases:
            alike.setdefault(json.dumps([case.show(shown) for shown in chosen]), []).append(case)
        if len(alike) == len(cases):
            return
        if name not in chosen and any(
            len({json.dumps(case.show(name)) for case in look}) > 1 for look in alike.values()
        ):
            chosen.append(name)


def _metrics(cases: Sequence[CaseOfJob], units: Mapping[str, str], asked: Sequence[str] | None) -> list[str]:
    preferred = _table_columns(cases)
    every = [*(name for name in preferred if name in units), *(name for name in units if name not in preferred)]
    if asked is not None:
        offered = {name for kind in KINDS.values() for name in kind.table_columns}
        known = [EVERY_METRIC, *units, *sorted(offered - set(units))]
        _refuse_unknown("columns", asked, known, there_is_something=bool(units))
        return list(dict.fromkeys(name for word in asked for name in (every if word == EVERY_METRIC else [word])))
    if not units:  # all jobs failed before they measured anything: their outcomes need a column
        return preferred[:1]
    outcomes: dict[str, set[str]] = {}
    for case in cases:
        for name in case.processes:
            outcomes.setdefault(name, set()).add(case.outcome(name))
    # A column that is unknown in some cell and "ok" in none is left out, even if other cells have a worse outcome.
    told = {name for name, found in outcomes.items() if "ok" in found or UNKNOWN not in found}
    return [name for name in preferred if name in told] or [name for name in units if name in told] or every[:1]


def _table_columns(cases: Sequence[CaseOfJob]) -> list[str]:
    return list(dict.fromkeys(name for kind in _kinds(cases) for name in KINDS[kind].table_columns))


def _kinds(cases: Sequence[CaseOfJob]) -> list[str]:
    """Return the kinds that the tables of these cases follow. Kinds that this version does not know are left out."""
    return [kind for kind in dict.fromkeys(kind for case in cases for kind in case.tabled_as) if kind in KINDS]


def _missing(cases: Sequence[CaseOfJob], coordinates: Sequence[str], metrics: Collection[str]) -> list[str]:
    """Return the reasons why these metrics have no numbers, for the cells that the jobs got to."""
    measured: set[int] = set()
    gaps = []
    for number, case in enumerate(cases):
        for metric, rows in case.processes.items():
            for row in rows:
                if row.outcome == "ok" and finite(row.value) is not None:
                    measured.add(number)
                elif metric in metrics:
                    gaps.append(Gap(number, metric, UNKNOWN if row.outcome == "ok" else row.outcome, row.reason or ""))
    return reasons([{name: case.show(name) for name in coordinates} for case in cases], measured, gaps)


def _refuse_unknown(what: str, asked: Sequence[str], known: Sequence[str], *, there_is_something: bool) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown and there_is_something:
        detail = f"{unknown[0]!r} is none of these results' {what}: {', '.join(known)}."
        raise InvalidRequest(detail, errors=(FieldError(f"/{what}", detail),))
