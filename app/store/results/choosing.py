"""Chooses the jobs of a table and their measurements: the SQL statements behind the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, Text, cast, func, select, tuple_, union_all

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
MAX_DOUBTFUL = 200
"""Most jobs of a table whose verdicts are read, to say why their rows are not valid."""
JOBS_PER_QUERY = MAX_JOBS
"""SQLite binds at most 32 766 values in a statement, so that one statement reads the measurements of a table."""

_measurement = tables.measurement.c
Labels = Sequence[tuple[str, str]]


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
) -> list[Row[Any]]:
    """Return the finished jobs that match all filters given, in order of submission: id, kind, state, spec, error, and
    `recorded`, the number of the last attempt that recorded results, None if there is none.

    Only the latest job of each point of a sweep counts: if the sweep was resumed, an earlier job has failed or was
    cancelled.

    Args:
        connection: the database.
        kind: jobs of this kind, or of one of these.
        sweep, jobs: jobs of one of these sweeps, and these jobs: the union of both.
        labels: jobs with all of these labels.
        since, until: jobs that finished in this time, `since` included.
        first: return only so many; None: all.

    Raises:
        NotFound: a sweep, or one of `jobs`, does not exist.
        InvalidRequest: there are more than MAX_JOBS jobs.
    """
    job, attempt = tables.job.c, tables.attempt.c
    ended = (attempt.job_id == job.id) & attempt.state.in_(FINISHED_STATES)
    recorded = select(func.max(attempt.number)).where(ended).scalar_subquery().label("recorded")
    query: Select[Any] = select(job.id, job.kind, job.state, job.spec, job.error, recorded)
    query = query.where(*JobFilter(labels=labels).conditions)
    if kind is not None:
        query = query.where(job.kind.in_([kind] if isinstance(kind, str) else kind))
    numbers = [sweep] if isinstance(sweep, int) else list(sweep or ())
    if numbers or jobs:
        _check_known(connection, tables.sweep.c.id, numbers, "sweep")
        _check_known(connection, job.id, jobs, "job")
        parts: list[Select[Any]] = []
        if numbers:
            parts.append(sweeps.latest_jobs(numbers))
        if jobs:
            parts.append(select(job.id).where(job.id.in_(jobs)))
        query = query.where(job.id.in_(parts[0] if len(parts) == 1 else union_all(*parts)))
    if since is not None:
        query = query.where(job.finished_at >= since)
    if until is not None:
        query = query.where(job.finished_at < until)
    finished = query.where(job.state.in_(FINISHED_STATES))
    found = list(connection.execute(finished.order_by(job.id).limit(MAX_JOBS + 1 if first is None else first)))
    if len(found) > MAX_JOBS:
        raise InvalidRequest(
            f"The table would have more than {MAX_JOBS} jobs: choose a sweep, jobs, a label, or since and until."
        )
    return found


def _check_known(connection: Connection, column: Any, numbers: Collection[int], what: str) -> None:
    if not numbers:
        return
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


def measurements(connection: Connection, jobs: Iterable[Row[Any]], statistic: Statistic) -> list[Row[Any]]:
    """Return the measurements of each job's last recorded attempt, job by job, in the order in which they were made.

    Each row has `statistic` as `value`, and beside a mean the standard deviation as `std`; `case` is JSON text, the
    same for all metrics of a case, so that the caller can decode it once.

    Raises:
        InvalidRequest: there are more than MAX_MEASUREMENTS.
    """
    recorded = _recorded(jobs)
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
    recorded = _recorded(jobs)
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


def _recorded(jobs: Iterable[Row[Any]]) -> dict[int, int]:
    return {job.id: job.recorded for job in jobs if job.recorded is not None}


def _of_attempts(statistic: Statistic, attempts: Mapping[int, int]) -> Select[Any]:
    """Build a query for the measurements of these attempts, given by job id: job by job, in the order they were made.

    Rows of other attempts of the jobs must not count towards a limit, so the statement itself leaves them out.
    """
    names = ("job_id", "attempt", "unit_index", "case_key", "device_key", "validity", "phase", "metric", "unit")
    facts = [_measurement[name] for name in (*names, "outcome", "reason", "partial", "n", "std")]
    case, value = cast(_measurement.case, Text).label("case"), _measurement[statistic].label("value")
    query = select(*facts, case, value).where(_measurement.job_id.in_(sorted(attempts)))
    # Nearly all jobs ran once, so that one number does for most of them, and costs less than a pair for each.
    usual = Counter(attempts.values()).most_common(1)[0][0] if attempts else 1
    others = sorted((job_id, number) for job_id, number in attempts.items() if number != usual)
    of_attempts = _measurement.attempt == usual
    if others:
        of_attempts &= _measurement.job_id.not_in([job_id for job_id, _ in others])
        of_attempts |= tuple_(_measurement.job_id, _measurement.attempt).in_(others)
    return query.where(of_attempts).order_by(_measurement.job_id, _measurement.id)


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
