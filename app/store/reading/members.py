"""The jobs of a sweep as its page shows them: their progress, and pages of them, chosen and sorted.

A sweep has up to 10 000 jobs, so that the database chooses, sorts and counts, and only one page of them is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    case,
    cast,
    func,
    nulls_last,
    select,
    type_coerce,
)

from app.errors import FieldError, InvalidRequest
from app.results.cases import column_name, lacks_processes, metric_names, planned_processes
from app.specs import KINDS, Scalar
from app.states import FINISHED_STATES, VERDICTS, JobState, Verdict, worst
from app.store import tables
from app.store.database.engine import Database
from app.store.public import finite, job_dict, rfc3339
from app.store.queue import sweeps
from app.store.queue.waiting import waiting_reasons
from app.store.reading.packed import decoded
from app.times import parsed_time

RECENT = 50
"""Number of jobs, the last to finish, whose durations give the estimate for the rest."""
OF_JOBS = ("job", "state", "duration", "verdict")
"""Keys by which members can be sorted, beside paths of the grid and metrics."""

_job, _measurement = tables.job.c, tables.measurement.c


@dataclass(frozen=True)
class Choice:
    """The members to show, and their order."""

    state: JobState | None = None
    verdict: Verdict | None = None
    at: Mapping[str, int] = field(default_factory=dict)
    """Index of the value on some of the grid's paths."""
    sort: str = "job"
    """One of OF_JOBS, a path of the grid, or a metric's column."""
    descending: bool = False


@dataclass(frozen=True)
class Progress:
    """The progress of a sweep."""

    counts: Mapping[str, int]
    """Number of points by their latest job's state."""
    running: Sequence[Mapping[str, Any]]
    """The jobs that run now, as public jobs."""
    started_at: str | None
    """The time when the first job started."""
    finished_at: str | None
    """The time when the last job finished."""
    left_s: float | None
    """Seconds until the rest will be done, if as many run at a time as now, and each takes as long as the last ones;
    None where nothing runs or nothing has finished."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def done(self) -> int:
        return self.total - self.counts["queued"] - self.counts["running"]


def progress(database: Database, sweep: Mapping[str, Any], now: datetime) -> Progress:
    """Return the present progress of a sweep, given as Reading.sweep returned it."""
    of_sweep = _job.sweep_id == sweep["id"]
    span = select(func.min(_job.started_at), func.max(_job.finished_at)).where(of_sweep)
    last = select(_job.started_at, _job.finished_at).where(of_sweep, _job.state == "succeeded")
    with database.read() as connection:
        started_at, finished_at = connection.execute(span).one()
        recent = connection.execute(last.order_by(_job.id.desc()).limit(RECENT)).all()
        rows = connection.execute(select(tables.job).where(of_sweep, _job.state == "running")).mappings().all()
    durations = [(end - start).total_seconds() for start, end in recent if start is not None and end is not None]
    running = [job_dict(row, None) for row in rows]
    return Progress(
        counts=sweep["counts"],
        running=running,
        started_at=rfc3339(started_at),
        finished_at=rfc3339(finished_at),
        left_s=_left(sweep["counts"]["queued"], running, durations, now),
    )


def _left(queued: int, running: Sequence[Mapping[str, Any]], durations: Sequence[float], now: datetime) -> float | None:
    """Return the seconds that queued and running jobs still need, by the mean of these durations."""
    if not durations or not running:
        return None
    each = sum(durations) / len(durations)
    ran = [(now - parsed_time(job["started_at"])).total_seconds() for job in running if job["started_at"]]
    rest = sum(max(each - seconds, 0.0) for seconds in ran)
    return (queued * each + rest) / len(running)


def page(
    database: Database, sweep: Mapping[str, Any], choice: Choice, *, limit: int, offset: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """Return one page of the sweep's points by their latest jobs, as public jobs with `values` on the grid's paths, and
    the number of all that match.

    Raises:
        InvalidRequest: `choice` names a path that the grid does not have, or an unknown sort key.
    """
    latest = sweeps.latest_jobs([sweep["id"]])
    conditions = _conditions(sweep, choice)
    # Only ids are sorted: the rows of ten thousand jobs are megabytes.
    members = select(_job.id).where(_job.id.in_(latest), *conditions)
    number = select(func.count()).select_from(members.subquery())
    with database.read() as connection:
        key, joined = _sort_key(connection, sweep, choice.sort, members)
        ordered = nulls_last(key.desc() if choice.descending else key.asc())
        direction = _job.id.desc() if choice.descending else _job.id
        ids = connection.execute(joined.order_by(ordered, direction).limit(limit).offset(offset)).scalars().all()
        of_page = connection.execute(select(tables.job).where(_job.id.in_(ids))).mappings()
        rows = sorted(of_page, key=lambda row: ids.index(row["id"]))
        # Without conditions the sweep has told their number.
        total = int(connection.execute(number).scalar_one()) if conditions else sum(sweep["counts"].values())
        waiting = waiting_reasons(connection, rows)
    return [{**job_dict(row, waiting.get(row["id"])), "values": _values(sweep, row["point"])} for row in rows], total


def metrics(
    database: Database, sweep_id: int | None, jobs: Sequence[int] = (), sample: int = RECENT
) -> dict[str, str | None]:
    """Return the columns of the metrics that these jobs measured, with their units, in the order of measurement; for a
    sweep, those of its last `sample` jobs.
    """
    of_sweep = select(_job.id).where(_job.sweep_id == sweep_id, _job.state == "succeeded").order_by(_job.id.desc())
    found: dict[str, str | None] = {}
    with database.read() as connection:
        chosen = [*jobs, *(connection.execute(of_sweep.limit(sample)).scalars() if sweep_id is not None else ())]
        measured = select(_measurement.metric, _measurement.phase, _measurement.unit, func.min(_measurement.id))
        grouped = measured.group_by(_measurement.metric, _measurement.phase, _measurement.unit)
        query = grouped.where(_measurement.job_id.in_(chosen)).order_by(func.min(_measurement.id))
        for row in connection.execute(query):
            found[column_name(row.metric, row.phase)] = row.unit
    return found


class Measured(NamedTuple):
    """One metric of a point of a sweep. See `Cell` for value, spread, n and outcome."""

    job: int
    values: Mapping[str, Scalar]
    value: float | None
    spread: float | None
    n: int | None
    outcome: str | None
    validity: str | None


def has_one_case_each(sweep: Mapping[str, Any]) -> bool:
    """Return True if each job of the sweep measures a single case, so that its point on the grid tells the case."""
    kind = KINDS.get(str(sweep["base"].get("kind")))
    return kind is not None and not kind.axes and not kind.holds_specs


def measured(database: Database, sweep: Mapping[str, Any], metric: str) -> list[Measured]:
    """Return one metric of all points of a sweep whose jobs have one case each, for plots of thousands of points.

    Values are means: of the samples of one process, or of the means of several. A point whose latest job failed or was
    cancelled has what all its processes had measured before, as in tables, or else that as its outcome. Points come in
    the order of submission, without those that have not ended.
    """
    of_unsuccessful = case((_job.state != "succeeded", cast(_job.spec, Text)))
    ended = select(
        _job.id, _job.attempt, _job.state, cast(_job.point, Text).label("point"), _job.error, of_unsuccessful
    )
    latest = ended.where(_job.id.in_(sweeps.latest_jobs([sweep["id"]])), _job.state.in_(FINISHED_STATES))
    of_sweep = select(_job.id).where(_job.sweep_id == sweep["id"])
    of_process = [_measurement[name] for name in ("job_id", "attempt", "metric", "phase", *_Process._fields)]
    of_metric = _measurement.job_id.in_(of_sweep) & _measurement.metric.in_(metric_names(metric))
    with database.read() as connection:
        jobs = connection.execute(latest.order_by(_job.id)).all()
        rows = connection.execute(select(*of_process).where(of_metric)).all()
    processes: dict[tuple[int, int], list[_Process]] = {}
    for job_id, attempt, name, phase, *process in rows:
        if column_name(name, phase) == metric:
            processes.setdefault((job_id, attempt), []).append(_Process._make(process))
    found = []
    points = decoded([job.point for job in jobs])
    for (job_id, attempt, state, _, error, spec), point in zip(jobs, points, strict=True):
        of_job = processes.get((job_id, attempt), ())
        is_whole = state == "succeeded" or _measured_by_all(of_job, spec)
        stopped = None if is_whole else (error or {}).get("code", state)
        found.append(_summed_up(job_id, _values(sweep, point), stopped, of_job))
    return found


class _Process(NamedTuple):
    """One process's measurement of a metric."""

    mean: float | None
    std: float | None
    n: int | None
    outcome: str
    validity: str | None


def _measured_by_all(rows: Sequence[_Process], spec: str) -> bool:
    """Return True if all processes that a job's spec, as JSON, asks for measured a metric."""
    planned = planned_processes(decoded([spec])[0])
    return bool(rows) and not lacks_processes([row.outcome for row in rows], planned)


def _summed_up(job: int, values: dict[str, Scalar], stopped: str | None, rows: Sequence[_Process]) -> Measured:
    """Return a point. `stopped`: why its job did not measure all of it; None if it did."""
    if stopped is None and len(rows) == 1 and rows[0].outcome == "ok":
        mean, std, n, _, verdict = rows[0]
        mean, validity = finite(mean), verdict if verdict in VERDICTS else None
        return Measured(job, values, mean, None if mean is None else finite(std), n, "ok", validity)
    outcome = stopped or next((row.outcome for row in rows if row.outcome != "ok"), "ok" if rows else None)
    verdicts = {row.validity for row in rows}
    validity = worst(verdicts)
    means = [mean for row in rows if (mean := finite(row.mean)) is not None]
    if outcome != "ok" or len(means) < len(rows):
        return Measured(job, values, None, None, None, outcome, validity)
    return Measured(job, values, statistics.fmean(means), statistics.stdev(means), len(means), "ok", validity)


def searched(sweep: Mapping[str, Any]) -> list[str]:
    """Return the path along which the sweep searches for the largest value that fits; none for a plain grid."""
    return [] if sweep["fit"] is None else [sweep["fit"]["axis"]]


def _conditions(sweep: Mapping[str, Any], choice: Choice) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if choice.state is not None:
        found.append(_job.state == choice.state)
    if choice.verdict is not None:
        found.append(type_coerce(_job.validity, JSON)["verdict"].as_string() == choice.verdict)
    for path, index in choice.at.items():
        if path not in sweep["grid"]:
            detail = f"The sweep's grid has no {path!r}; its paths: {', '.join(sweep['grid'])}."
            raise InvalidRequest(detail, errors=(FieldError("/at", detail),))
        found.append(_index_on(path) == index)
    return found


def _index_on(path: str) -> ColumnElement[int]:
    index: ColumnElement[int] = type_coerce(_job.point, JSON)[path].as_integer()
    return index


def _sort_key(
    connection: Connection, sweep: Mapping[str, Any], sort: str, members: Select[Any]
) -> tuple[ColumnElement[Any], Select[Any]]:
    """Return the expression to sort by, and the query with the joins that it needs."""
    own: dict[str, ColumnElement[Any]] = {
        "job": _job.id,
        "state": _job.state,
        "duration": func.julianday(_job.finished_at) - func.julianday(_job.started_at),
        "verdict": type_coerce(_job.validity, JSON)["verdict"].as_string(),
    }
    if sort in own:
        return own[sort], members
    if sort in (*sweep["grid"], *searched(sweep)):
        return _index_on(sort), members
    named = [
        (row.metric, row.phase)
        for row in connection.execute(
            select(_measurement.metric, _measurement.phase)
            .distinct()
            .where(_measurement.job_id.in_(_some_jobs(sweep["id"])))
        )
        if column_name(row.metric, row.phase) == sort
    ]
    if not named:
        known = ", ".join([*OF_JOBS, *sweep["grid"], *searched(sweep)])
        detail = f"{sort!r} is nothing that these jobs can be sorted by: {known}, or a metric that they measured."
        raise InvalidRequest(detail, errors=(FieldError("/sort", detail),))
    metric, phase = named[0]
    of_metric = and_(_measurement.metric == metric, _measurement.phase.is_not_distinct_from(phase))
    values = (
        select(_measurement.job_id, func.avg(_measurement.median).label("value"))
        .where(_measurement.job_id.in_(select(_job.id).where(_job.sweep_id == sweep["id"])), of_metric)
        .group_by(_measurement.job_id)
        .subquery()
    )
    return values.c.value, members.join(values, values.c.job_id == _job.id, isouter=True)


def _some_jobs(sweep_id: int) -> Select[Any]:
    return select(_job.id).where(_job.sweep_id == sweep_id, _job.state == "succeeded").limit(RECENT)


def _values(sweep: Mapping[str, Any], point: Any) -> dict[str, Scalar]:
    """Return the point's value on each path."""
    found = {path: values[point[path]] for path, values in sweep["grid"].items() if path in point}
    for path in searched(sweep):
        if path in point:  # on the axis of a search a point has the value itself
            found[path] = point[path]
    return found
