"""Chooses the jobs of a table and their measurements: the SQL statements behind the tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, Text, cast, func, select, tuple_

from app.errors import InvalidRequest, NotFound
from app.layout import Statistic
from app.specs import KINDS
from app.states import FINISHED_STATES
from app.store import sweeps, tables
from app.store.filters import JobFilter
from app.store.public import checked_id

MAX_JOBS = 10_000
MAX_MEASUREMENTS = 200_000
"""Most measurements of one table: a table is made in memory, of which this many take some 250 MB."""
MAX_BEGINNING = 5_000
"""Most measurements that are read for the beginning of a table, as pages show it."""
# SQLite binds at most 32 766 values in a statement.
JOBS_PER_QUERY = 1000

_measurement = tables.measurement.c
Labels = Sequence[tuple[str, str]]


def choose_jobs(
    connection: Connection,
    *,
    kind: str | None,
    sweep: int | None,
    jobs: Collection[int],
    labels: Labels,
    first: int | None = None,
) -> list[Row[Any]]:
    """Return the finished jobs that match all filters given, in order of submission: id, kind, state, spec, error.

    Only the latest job of each point of a sweep counts: if the sweep was resumed, an earlier job has failed or was
        cancelled.

    Args:
        connection: the database.
        kind, sweep, jobs, labels: the filters.
        first: return only so many; None: all.

    Raises:
        NotFound: the sweep, or one of `jobs`, does not exist.
        InvalidRequest: there are more than MAX_JOBS jobs.
    """
    job = tables.job.c
    query: Select[Any] = select(job.id, job.kind, job.state, job.spec, job.error)
    query = query.where(*JobFilter(kind=kind, labels=labels).conditions)
    if sweep is not None:
        _check_sweep(connection, sweep)
        query = query.where(job.id.in_(sweeps.latest_jobs([sweep])))
    if jobs:
        _check_jobs(connection, jobs)
        query = query.where(job.id.in_(jobs))
    finished = query.where(job.state.in_(FINISHED_STATES))
    found = list(connection.execute(finished.order_by(job.id).limit(MAX_JOBS + 1 if first is None else first)))
    if len(found) > MAX_JOBS:
        raise InvalidRequest(f"The table would have more than {MAX_JOBS} jobs: choose a sweep, or jobs.")
    return found


def _check_sweep(connection: Connection, sweep: int) -> None:
    known = select(tables.sweep.c.id).where(tables.sweep.c.id == checked_id(sweep, "sweep"))
    if connection.execute(known).one_or_none() is None:
        raise NotFound(f"There is no sweep {sweep}.")


def _check_jobs(connection: Connection, jobs: Collection[int]) -> None:
    job = tables.job.c
    known = select(job.id).where(job.id.in_([checked_id(number, "job") for number in jobs]))
    unknown = set(jobs) - set(connection.execute(known).scalars())
    if unknown:
        raise NotFound(f"There is no job {min(unknown)}.")


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


def measurements(connection: Connection, jobs: Iterable[Row[Any]], statistic: Statistic) -> list[Row[Any]]:
    """Return the measurements of each job's last recorded attempt, job by job, in the order in which they were made.

    Each row has `statistic` as `value`, and beside a mean the standard deviation as `std`; `case` is JSON text, the
    same for all metrics of a case, so that the caller can decode it once.

    Raises:
        InvalidRequest: there are more than MAX_MEASUREMENTS.
    """
    recorded = recorded_attempts(connection, [job.id for job in jobs])
    found: list[Row[Any]] = []
    for part in _parts(sorted(recorded)):
        query = _of_attempts(statistic, {job_id: recorded[job_id] for job_id in part})
        found += connection.execute(query.limit(MAX_MEASUREMENTS + 1 - len(found)))
        if len(found) > MAX_MEASUREMENTS:
            raise InvalidRequest(
                f"The table would have more than {MAX_MEASUREMENTS} measurements: choose fewer jobs, or read each "
                "job's measurements page by page at /jobs/{id}/measurements."
            )
    return found


def first_measurements(
    connection: Connection, jobs: Sequence[Row[Any]], statistic: Statistic
) -> tuple[list[Row[Any]], list[Row[Any]], bool]:
    """Return the first jobs, with all their measurements as above, and if anything is left out.

    At most MAX_BEGINNING measurements are read. Of a first job with more of them, only the cases are returned that were
    read whole; none if the job has several units, since later ones may measure the same cases again.
    """
    job_ids = [job.id for job in jobs]
    recorded = recorded_attempts(connection, job_ids)
    found = list(connection.execute(_of_attempts(statistic, recorded).limit(MAX_BEGINNING + 1)))
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


def _of_attempts(statistic: Statistic, attempts: Mapping[int, int]) -> Select[Any]:
    """Build a query for the measurements of these attempts, given by job id: job by job, in the order they were made.

    Rows of other attempts of the jobs must not count towards a limit, so the statement itself leaves them out.
    """
    names = ("job_id", "attempt", "unit_index", "case_key", "device_key", "validity", "phase", "metric", "unit")
    facts = [_measurement[name] for name in (*names, "outcome", "reason", "n", "std")]
    case, value = cast(_measurement.case, Text).label("case"), _measurement[statistic].label("value")
    # The first condition finds the rows by the index on job_id, in order; the second one looks at each.
    of_jobs = _measurement.job_id.in_(sorted(attempts))
    of_attempts = tuple_(_measurement.job_id, _measurement.attempt).in_(sorted(attempts.items()))
    return select(*facts, case, value).where(of_jobs, of_attempts).order_by(_measurement.job_id, _measurement.id)


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


def _parts(job_ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (job_ids[start : start + JOBS_PER_QUERY] for start in range(0, len(job_ids), JOBS_PER_QUERY))
