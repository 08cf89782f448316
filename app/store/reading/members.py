"""The jobs of a sweep as its page shows them: their progress, and pages of them, chosen and sorted.

A sweep has up to 10 000 jobs, so that the database chooses, sorts and counts, and only one page of them is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, func, nulls_last, select

from app.errors import InvalidRequest
from app.metrics import column_name
from app.specs import KINDS, Scalar
from app.states import JobState
from app.store import tables
from app.store.column_types import as_json, seconds_between
from app.store.database.engine import Database
from app.store.public import job_dict, rfc3339
from app.store.queue import fitting, sweeps
from app.store.queue.waiting import waiting_reasons
from flopwatch.text.times import parsed_time

RECENT = 50
"""Number of jobs, the last to finish, whose durations give the estimate for the rest."""
OF_JOBS = ("job", "state", "duration", "verdict")
"""Keys by which members can be sorted, beside paths of the grid and metrics."""

_job, _measurement = tables.job.c, tables.measurement.c


@dataclass(frozen=True)
class MemberQuery:
    """The members to show, and their order."""

    state: JobState | None = None
    sort: str = "job"
    """One of OF_JOBS, a path of the grid (numbers in ascending order, others in the grid's) or, where each job has one
    case, a metric's column."""
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
    None where nothing runs or nothing has finished, and of a search, which submits more jobs as it goes."""

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
        left_s=None if sweep["fit"] else _left(sweep["counts"]["queued"], running, durations, now),
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
    database: Database, sweep: Mapping[str, Any], choice: MemberQuery, *, limit: int, offset: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """Return one page of the sweep's points by their latest jobs, as public jobs with `values` on the grid's paths, and
    the number of all that match. Raises InvalidRequest for an unknown sort key."""
    latest = sweeps.latest_jobs([sweep["id"]])
    conditions = [] if choice.state is None else [_job.state == choice.state]
    # Only ids are sorted: the rows of ten thousand jobs are megabytes.
    members = select(_job.id).where(_job.id.in_(latest), *conditions)
    number = select(func.count()).select_from(members.subquery())
    with database.read() as connection:
        key = _sort_key(connection, sweep, choice.sort)
        ordered = nulls_last(key.desc() if choice.descending else key.asc())
        direction = _job.id.desc() if choice.descending else _job.id
        ids = connection.execute(members.order_by(ordered, direction).limit(limit).offset(offset)).scalars().all()
        of_page = connection.execute(select(tables.job).where(_job.id.in_(ids))).mappings()
        rows = sorted(of_page, key=lambda row: ids.index(row["id"]))
        # Without conditions, their number is that of the sweep's points.
        total = int(connection.execute(number).scalar_one()) if conditions else sum(sweep["counts"].values())
        waiting, lacking = waiting_reasons(connection, rows), out_of_memory(connection, rows)
    jobs = [job_dict(row, waiting.get(row["id"]), out_of_memory=row["id"] in lacking) for row in rows]
    return [{**job, "values": _values(sweep, row["point"])} for job, row in zip(jobs, rows, strict=True)], total


def out_of_memory(connection: Connection, rows: Iterable[RowMapping]) -> set[int]:
    """Return which of these jobs succeeded although their only case ran out of memory."""
    measurement = tables.measurement.c
    # Jobs with several cases have no `metrics`, so few measurements are read. One without a device only computes.
    measured = (row for row in rows if row["state"] == "succeeded" and row["metrics"] is not None)
    ids = [row["id"] for row in measured if row["device_type"] != "none"]
    if not ids:
        return set()
    query = select(measurement.job_id).distinct().join(tables.job, _job.id == measurement.job_id)
    query = query.where(
        measurement.job_id.in_(ids), measurement.attempt == _job.attempt, measurement.outcome == fitting.TOO_LARGE
    )
    return set(connection.execute(query).scalars())


def metrics(
    database: Database, sweep_id: int | None, jobs: Sequence[int] = (), sample: int | None = RECENT
) -> dict[str, str | None]:
    """Return the columns of the metrics that these jobs measured, with their units, in the order of measurement; for a
    sweep, those of its last `sample` jobs; None: of all."""
    of_sweep = select(_job.id).where(_job.sweep_id == sweep_id, _job.state == "succeeded").order_by(_job.id.desc())
    units: dict[str, str | None] = {}
    with database.read() as connection:
        chosen = [*jobs, *(connection.execute(of_sweep.limit(sample)).scalars() if sweep_id is not None else ())]
        measured = select(_measurement.metric, _measurement.phase, _measurement.unit, func.min(_measurement.id))
        grouped = measured.group_by(_measurement.metric, _measurement.phase, _measurement.unit)
        query = grouped.where(_measurement.job_id.in_(chosen)).order_by(func.min(_measurement.id))
        for row in connection.execute(query):
            units[column_name(row.metric, row.phase)] = row.unit
    return units


def has_one_case_each(sweep: Mapping[str, Any]) -> bool:
    """Return True if each job of the sweep measures a single case, so that its point on the grid tells the case."""
    kind = KINDS.get(str(sweep["base"].get("kind")))
    return kind is not None and not kind.axes and not kind.has_sides


def searched(sweep: Mapping[str, Any]) -> list[str]:
    """Return the path along which the sweep searches for the largest value that fits; none for a plain grid."""
    return [] if sweep["fit"] is None else [sweep["fit"]["axis"]]


def _index_on(path: str) -> ColumnElement[int]:
    index: ColumnElement[int] = as_json(_job.point)[path].as_integer()
    return index


def _number_on(path: str) -> ColumnElement[float]:
    number: ColumnElement[float] = as_json(_job.spec)[tuple(path.split("."))].as_float()
    return number


def _sort_key(connection: Connection, sweep: Mapping[str, Any], sort: str) -> ColumnElement[Any]:
    own: dict[str, ColumnElement[Any]] = {
        "job": _job.id,
        "state": _job.state,
        "duration": seconds_between(_job.started_at, _job.finished_at),
        "verdict": as_json(_job.validity)["verdict"].as_string(),
    }
    if sort in own:
        return own[sort]
    if sort in (*sweep["grid"], *searched(sweep)):
        has_numbers = {type(value) for value in sweep["grid"].get(sort, ())} <= {int, float}
        return _number_on(sort) if has_numbers and sort in sweep["grid"] else _index_on(sort)
    value: ColumnElement[float] = as_json(_job.metrics)[sort].as_float()
    measured = select(_job.id).where(_job.sweep_id == sweep["id"], value.is_not(None))
    if connection.execute(measured.limit(1)).first() is None:
        known = ", ".join([*OF_JOBS, *sweep["grid"], *searched(sweep)])
        detail = f"{sort!r} is nothing that these jobs can be sorted by: {known}, or a metric that they measured."
        raise InvalidRequest.at("/sort", detail)
    return value


def _values(sweep: Mapping[str, Any], point: Any) -> dict[str, Scalar]:
    on_paths = {path: values[point[path]] for path, values in sweep["grid"].items() if path in point}
    for path in searched(sweep):
        if path in point:  # on the axis of a search a point has the value itself
            on_paths[path] = point[path]
    return on_paths
