"""Chooses the jobs of a table and their measurements: the SQL statements behind the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, cast, func, select, tuple_, union_all

from app.errors import InvalidRequest, NotFound
from app.specs import KINDS
from app.states import FINISHED_STATES
from app.store import tables
from app.store.public import checked_id
from app.store.queue import sweeps
from app.store.reading.filters import JobFilter
from app.table_options import Statistic

MAX_JOBS = 10_000
MAX_MEASUREMENTS = 200_000
"""Largest number of measurements of one table. A table is made in memory; this many take some 250 MB."""
MAX_BEGINNING = 5_000
"""Most measurements that are read for the beginning of a table, as pages show it."""
MAX_DOUBTFUL = 200
"""Most jobs of a table whose verdicts are read, to say why their rows are not valid."""
JOBS_PER_QUERY = MAX_JOBS
"""SQLite binds at most 32 766 values in a statement, so that one statement reads the measurements of a table."""

_measurement = tables.measurement.c


class Measured(NamedTuple):
    """A measurement of a table: a plain tuple, since there are hundreds of thousands, each of which is read many times.

    SQLAlchemy's rows look every name up, which takes seven times as long.
    """

    job_id: int
    attempt: int
    unit_index: int
    case_key: str
    device_key: str
    validity: str | None
    phase: str | None
    metric: str
    unit: str
    outcome: str
    reason: str | None
    n: int | None
    std: float | None
    case: str
    """JSON text, the same for all metrics of a case, so that it is decoded once."""
    value: float | None
    """The statistic that was asked for."""


Labels = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Choice:
    """The finished jobs that a table shows: those that match all filters given.

    Only the latest job of each point of a sweep counts: if the sweep was resumed, an earlier job has failed or was
    cancelled.
    """

    kind: str | Collection[str] | None = None
    """Jobs of this kind, or of one of these."""
    sweep: int | Collection[int] | None = None
    jobs: Collection[int] = ()
    """Jobs of one of these sweeps, and these jobs: the union of both."""
    labels: Labels = ()
    """Jobs with all of these labels."""
    since: datetime | None = None
    until: datetime | None = None
    """Jobs that finished at or after `since` and before `until`."""

    @property
    def sweeps(self) -> list[int]:
        return [self.sweep] if isinstance(self.sweep, int) else list(self.sweep or ())

    @property
    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions for `where(…)` on the table `job`."""
        job = tables.job.c
        found = [job.state.in_(FINISHED_STATES), *JobFilter(labels=self.labels).conditions]
        if self.kind is not None:
            found.append(job.kind.in_([self.kind] if isinstance(self.kind, str) else self.kind))
        parts: list[Select[Any]] = []
        if self.sweeps:
            parts.append(sweeps.latest_jobs(self.sweeps))
        if self.jobs:
            parts.append(select(job.id).where(job.id.in_(self.jobs)))
        if parts:
            found.append(job.id.in_(parts[0] if len(parts) == 1 else union_all(*parts)))
        if self.since is not None:
            found.append(job.finished_at >= self.since)
        if self.until is not None:
            found.append(job.finished_at < self.until)
        return found

    def check(self, connection: Connection) -> None:
        """Raise NotFound when a sweep, or one of the jobs, does not exist."""
        _check_known(connection, tables.sweep.c.id, self.sweeps, "sweep")
        _check_known(connection, tables.job.c.id, self.jobs, "job")


def choose_jobs(
    connection: Connection,
    *,
    kind: str | Collection[str] | None = None,
    sweep: int | Collection[int] | None = None,
    jobs: Collection[int] = (),
    labels: Labels = (),
    since: datetime | None = None,
    until: datetime | None = None,
    first: int | None = None,
    after: int = 0,
) -> list[Row[Any]]:
    """Return the finished jobs of a Choice, in order of submission: id, kind, state, spec, error, and `recorded`, the
    number of the last attempt that recorded results, None if there is none.

    Args:
        connection: the database.
        kind, sweep, jobs, labels, since, until: the choice.
        first: return only so many; None: all.
        after: only jobs with a greater id.

    Raises:
        NotFound: a sweep, or one of `jobs`, does not exist.
        InvalidRequest: there are more than MAX_JOBS jobs.
    """
    choice = Choice(kind, sweep, jobs, labels, since, until)
    choice.check(connection)
    found = jobs_of(connection, choice, MAX_JOBS + 1 if first is None else first, after)
    if len(found) > MAX_JOBS:
        raise InvalidRequest(
            f"The table would have more than {MAX_JOBS} jobs: choose a sweep, jobs, a label, or since and until; "
            "or take it as JSON or CSV, in the order of submission, which have no such limit."
        )
    return found


def jobs_of(connection: Connection, choice: Choice, first: int, after: int = 0) -> list[Row[Any]]:
    """Return the first jobs of a choice whose id is above `after`, as `choose_jobs` does."""
    job, attempt = tables.job.c, tables.attempt.c
    ended = (attempt.job_id == job.id) & attempt.state.in_(FINISHED_STATES)
    recorded = select(func.max(attempt.number)).where(ended).scalar_subquery().label("recorded")
    query: Select[Any] = select(job.id, job.kind, job.state, job.spec, job.error, recorded).where(*choice.conditions)
    if after:
        query = query.where(job.id > after)
    return list(connection.execute(query.order_by(job.id).limit(first)))


def kinds_of(connection: Connection, choice: Choice) -> list[str]:
    """Return the kinds of the jobs of a choice, by name."""
    kind = tables.job.c.kind
    return list(connection.execute(select(kind).where(*choice.conditions).distinct().order_by(kind)).scalars())


def is_too_large(connection: Connection, choice: Choice) -> bool:
    """Return True if a choice has more jobs, or measurements, than a table that is made as a whole."""
    job = tables.job.c
    chosen = select(job.id).where(*choice.conditions)
    number = select(func.count()).select_from(chosen.limit(MAX_JOBS + 1).subquery())
    if connection.execute(number).scalar_one() > MAX_JOBS:
        return True
    measured = select(_measurement.id).where(_measurement.job_id.in_(chosen)).limit(MAX_MEASUREMENTS + 1)
    count: int = connection.execute(select(func.count()).select_from(measured.subquery())).scalar_one()
    return count > MAX_MEASUREMENTS


def distinct_cases(connection: Connection, choice: Choice) -> list[Row[Any]]:
    """Return each case that the chosen jobs measured, once for each device: kind, case as JSON text, device_key."""
    job = tables.job.c
    case = cast(_measurement.case, Text).label("case")
    joined = tables.job.join(tables.measurement, _measurement.job_id == job.id)
    query = select(job.kind, case, _measurement.device_key).select_from(joined).where(*choice.conditions).distinct()
    return list(connection.execute(query))


def unmeasured_specs(connection: Connection, choice: Choice) -> list[Row[Any]]:
    """Return the specs of chosen jobs that measured nothing before they failed or were cancelled: kind, spec."""
    job = tables.job.c
    measured = select(_measurement.job_id).where(_measurement.job_id == job.id).exists()
    spec = cast(job.spec, Text).label("spec")
    query = select(job.kind, spec).where(*choice.conditions, job.state != "succeeded", ~measured).distinct()
    return list(connection.execute(query))


def distinct_metrics(connection: Connection, choice: Choice) -> list[Row[Any]]:
    """Return each metric that the chosen jobs measured, once for each outcome: metric, phase, unit, outcome."""
    columns = [_measurement[name] for name in ("metric", "phase", "unit", "outcome")]
    chosen = select(tables.job.c.id).where(*choice.conditions)
    query = select(*columns, func.min(_measurement.id).label("first")).where(_measurement.job_id.in_(chosen))
    return list(connection.execute(query.group_by(*columns).order_by("first")))


def counts(connection: Connection, jobs: Iterable[Row[Any]]) -> dict[int, int]:
    """Return the number of measurements of each job, of all its attempts."""
    of_jobs = _measurement.job_id.in_([job.id for job in jobs])
    query = select(_measurement.job_id, func.count()).where(of_jobs).group_by(_measurement.job_id)
    return dict(map(tuple, connection.execute(query)))


def _check_known(connection: Connection, column: Any, numbers: Collection[int], what: str) -> None:
    if not numbers:
        return  # nearly always one of both is empty, and needs no statement
    known = select(column).where(column.in_([checked_id(number, what) for number in numbers]))
    unknown = set(numbers) - set(connection.execute(known).scalars())
    if unknown:
        raise NotFound(f"There is no {what} {min(unknown)}.")


def recorded_attempts(connection: Connection, job_ids: Sequence[int]) -> dict[int, int]:
    """Return for each job the number of its last attempt that recorded results; jobs without one are left out.

    An attempt that was lost, or was given back to the queue, records nothing.
    """
    attempt = tables.attempt.c
    query = select(attempt.job_id, func.max(attempt.number)).where(attempt.state.in_(FINISHED_STATES))
    found: dict[int, int] = {}
    for part in _parts(job_ids):
        found |= dict(map(tuple, connection.execute(query.where(attempt.job_id.in_(part)).group_by(attempt.job_id))))
    return found


def recorded_attempt(connection: Connection, job_id: int, attempt: int | None) -> int | None:
    """Return `attempt` if it recorded results, or, if it is None, the job's last one that did; None if there is none.

    Raises NotFound when the job has had no such attempt.
    """
    if attempt is None:
        return recorded_attempts(connection, [job_id]).get(job_id)
    check_attempt(connection, job_id, attempt)
    of_it = (tables.attempt.c.job_id == job_id) & (tables.attempt.c.number == attempt)
    ended = select(tables.attempt.c.number).where(of_it, tables.attempt.c.state.in_(FINISHED_STATES))
    return connection.execute(ended.limit(1)).scalar_one_or_none()


def check_attempt(connection: Connection, job_id: int, attempt: int) -> None:
    """Raise NotFound when the job has had no attempt of this number."""
    known = select(tables.attempt.c.id).where(tables.attempt.c.job_id == job_id, tables.attempt.c.number == attempt)
    if connection.execute(known.limit(1)).one_or_none() is None:
        raise NotFound(f"Job {job_id} has had no attempt {attempt}.")


def measurements(
    connection: Connection,
    jobs: Iterable[Row[Any]],
    statistic: Statistic,
    metrics: Collection[str] | None = None,
    *,
    limited: bool = True,
) -> list[Measured]:
    """Return the measurements of each job's last recorded attempt, job by job, in the order in which they were made.

    `metrics`: only these; None: all. `limited`: refuse more than MAX_MEASUREMENTS.

    Raises:
        InvalidRequest: there are more than MAX_MEASUREMENTS.
    """
    recorded = _recorded(jobs)
    found: list[Measured] = []
    for part in _parts(sorted(recorded)):
        query = _of_attempts(statistic, {job_id: recorded[job_id] for job_id in part})
        if metrics is not None:
            query = query.where(_measurement.metric.in_(metrics))
        found += _read(connection, query.limit(MAX_MEASUREMENTS + 1 - len(found)) if limited else query)
        if limited and len(found) > MAX_MEASUREMENTS:
            raise InvalidRequest(
                f"The table would have more than {MAX_MEASUREMENTS} measurements: choose fewer jobs, or read each "
                "job's measurements page by page at /jobs/{id}/measurements; or take the table as JSON or CSV, without "
                "pivot, reference and order, which have no such limit."
            )
    return found


def first_measurements(
    connection: Connection, jobs: Sequence[Row[Any]], statistic: Statistic
) -> tuple[list[Row[Any]], list[Measured], bool]:
    """Return the first jobs, with all their measurements as above, and whether anything is left out.

    At most MAX_BEGINNING measurements are read. If the first job alone has more, only its completely read cases are
    returned; none if the job has several units, since later units may measure the same cases again.
    """
    job_ids = [job.id for job in jobs]
    recorded = _recorded(jobs)
    found = _read(connection, _of_attempts(statistic, recorded).limit(MAX_BEGINNING + 1))
    if len(found) <= MAX_BEGINNING:
        return list(jobs), found, False
    last = found[-1]
    if last.job_id != job_ids[0]:
        whole = [job for job in jobs if job.id < last.job_id]
        return whole, [row for row in found if row.job_id < last.job_id], True
    if _number_of_units(connection, last.job_id, recorded[last.job_id]) > 1:
        return [], [], True
    cut = (last.case_key, last.device_key)
    return list(jobs[:1]), [row for row in found if (row.case_key, row.device_key) != cut], True


def _recorded(jobs: Iterable[Row[Any]]) -> dict[int, int]:
    return {job.id: job.recorded for job in jobs if job.recorded is not None}


def _of_attempts(statistic: Statistic, attempts: Mapping[int, int]) -> Select[Any]:
    """Build a query for the measurements of these attempts, given by job id: job by job, in the order they were made.

    Rows of other attempts of the jobs must not count towards a limit, so the statement itself leaves them out.
    """
    facts = [_measurement[name] for name in Measured._fields if name not in ("case", "value")]
    columns = (*facts, cast(_measurement.case, Text), _measurement[statistic])
    query = select(*columns).where(_measurement.job_id.in_(sorted(attempts)))
    # Nearly all jobs ran once, so one number serves most of them, at less cost than a pair for each.
    usual = Counter(attempts.values()).most_common(1)[0][0] if attempts else 1
    others = sorted((job_id, number) for job_id, number in attempts.items() if number != usual)
    of_attempts = _measurement.attempt == usual
    if others:
        of_attempts &= _measurement.job_id.not_in([job_id for job_id, _ in others])
        of_attempts |= tuple_(_measurement.job_id, _measurement.attempt).in_(others)
    return query.where(of_attempts).order_by(_measurement.job_id, _measurement.id)


def _read(connection: Connection, query: Select[Any]) -> list[Measured]:
    return list(map(Measured._make, connection.execute(query).all()))


def _number_of_units(connection: Connection, job_id: int, attempt: int) -> int:
    unit = tables.unit.c
    query = select(func.count()).where(unit.job_id == job_id, unit.attempt == attempt)
    number: int = connection.execute(query).scalar_one()
    return number


def sides(connection: Connection, jobs: Iterable[Row[Any]]) -> dict[tuple[int, int, int], str]:
    """Return the side of each unit of comparisons, by (job, attempt, unit index)."""
    unit = tables.unit.c
    query = select(unit.job_id, unit.attempt, unit.unit_index, unit.side).where(unit.side.is_not(None))
    comparisons = [job.id for job in jobs if job.kind in KINDS and KINDS[job.kind].holds_specs]
    return {
        (row.job_id, row.attempt, row.unit_index): row.side
        for part in _parts(comparisons)
        for row in connection.execute(query.where(unit.job_id.in_(part)))
    }


def unit_verdicts(
    connection: Connection, attempts: Mapping[int, int], first: int = MAX_DOUBTFUL
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the verdicts of units of these attempts, given by job id: by (job, unit index). At most `first` jobs."""
    unit = tables.unit.c
    wanted = sorted(attempts)[:first]
    query = select(unit.job_id, unit.attempt, unit.unit_index, unit.validity).where(unit.job_id.in_(wanted))
    return {
        (row.job_id, row.unit_index): row.validity
        for row in (connection.execute(query) if wanted else ())
        if row.attempt == attempts[row.job_id] and isinstance(row.validity, dict)
    }


def _parts(job_ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (job_ids[start : start + JOBS_PER_QUERY] for start in range(0, len(job_ids), JOBS_PER_QUERY))
