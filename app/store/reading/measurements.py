"""Chooses the jobs of a table and their measurements: the SQL statements behind the tables."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, ScalarSelect, Select, Text, cast, func, select, tuple_, union_all

from app.errors import InvalidRequest, NotFound
from app.specs import KINDS
from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.engine import Snapshot
from app.store.public import checked_id, row_of
from app.store.queue import sweeps
from app.store.reading.filters import JobFilter
from flopwatch.table_options import Statistic

MAX_JOBS = 10_000
"""Most jobs of a table. SQLite binds 32 766 values in a statement, so that one statement takes all of them."""
MAX_MEASUREMENTS = 200_000
"""Largest number of measurements of one table. A table is made in memory; this many take some 250 MB."""
MAX_BEGINNING = 5_000
"""Most measurements that are read for the beginning of a table, as pages show it."""
MAX_DOUBTFUL = 200
"""Most jobs of a table whose verdicts are read, to say why their rows are not valid."""

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
    low: float | None = None
    """The interval of the median, if that is the statistic."""
    high: float | None = None
    fastest: float | None = None
    """The smallest sample and, in `slowest`, the largest one, if the statistic is the median."""
    slowest: float | None = None
    mean: float | None = None
    """Read for comparisons, as `samples`."""
    samples: bytes | None = None
    """The samples as they are stored, where processes have different numbers of them."""


Key = tuple[int, int, int, str, str, str, str | None]
"""Names a measurement of a table: job, attempt, unit, case, device, metric and phase."""


def key_of(row: Any) -> Key:
    return row.job_id, row.attempt, row.unit_index, row.case_key, row.device_key, row.metric, row.phase


_FACTS = Measured._fields[: Measured._fields.index("case")]
"""The columns that every table reads."""
Labels = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class FinishedJob:
    """A finished job with results."""

    id: int
    kind: str
    state: str
    spec: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    recorded: int | None = None
    """The number of the last attempt that recorded results; None if there is none."""

    @property
    def stopped(self) -> str | None:
        """The code of why it did not succeed; None if it did."""
        return None if self.state == "succeeded" else (self.error or {}).get("code", self.state)

    @property
    def has_sides(self) -> bool:
        """True if it is a comparison, whose spec holds those of its sides."""
        return self.kind in KINDS and KINDS[self.kind].has_sides


@dataclass(frozen=True)
class JobChoice:
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
        conditions = [job.state.in_(FINISHED_STATES), *self._of_any_state]
        if self.since is not None:
            conditions.append(job.finished_at >= self.since)
        if self.until is not None:
            conditions.append(job.finished_at < self.until)
        return conditions

    @property
    def unfinished(self) -> list[ColumnElement[bool]]:
        """Return the same for jobs that have not finished yet."""
        return [tables.job.c.state.not_in(FINISHED_STATES), *self._of_any_state]

    @property
    def _of_any_state(self) -> list[ColumnElement[bool]]:
        job = tables.job.c
        conditions = JobFilter(labels=self.labels).conditions
        if self.kind is not None:
            conditions.append(job.kind.in_([self.kind] if isinstance(self.kind, str) else self.kind))
        parts: list[Select[Any]] = []
        if self.sweeps:
            parts.append(sweeps.latest_jobs(self.sweeps))
        if self.jobs:
            parts.append(select(job.id).where(job.id.in_(self.jobs)))
        if parts:
            conditions.append(job.id.in_(parts[0] if len(parts) == 1 else union_all(*parts)))
        return conditions

    def check(self, snapshot: Snapshot) -> None:
        """Raise NotFound when a sweep, or one of the jobs, does not exist."""
        _check_known(snapshot, tables.sweep.c.id, self.sweeps, "sweep")
        _check_known(snapshot, tables.job.c.id, self.jobs, "job")


def choose_jobs(snapshot: Snapshot, choice: JobChoice, first: int | None = None) -> list[FinishedJob]:
    """Return the jobs of a choice, the `first` or all, in order of submission; those of a search for what fits, in the
    order of the values tried. Raises NotFound for a sweep or job that does not exist, and InvalidRequest for more than
    MAX_JOBS."""
    choice.check(snapshot)
    job = tables.job.c
    columns = (job.id, job.kind, job.state, job.spec, job.error, last_recorded(job.id))
    query = select(*columns).where(*choice.conditions)
    tried = _tried(snapshot, choice.sweeps)
    limit = MAX_JOBS + 1 if first is None or tried else first
    rows = snapshot.execute(query.order_by(job.id).limit(limit)).all()
    if len(rows) > MAX_JOBS:
        raise InvalidRequest(
            f"The table would have more than {MAX_JOBS} jobs: choose a sweep, jobs, a label, or since and until."
        )
    return sorted((FinishedJob(*row) for row in rows), key=lambda job: tried.get(job.id, (job.id,)))[:first]


def unfinished_jobs(snapshot: Snapshot, choice: JobChoice) -> dict[str, list[int]]:
    """Return the jobs that a choice names, by id, sweep or label, and that have not finished, by their state."""
    found: dict[str, list[int]] = {}
    if choice.jobs or choice.sweeps or (choice.labels and choice.until is None):
        query = select(tables.job.c.state, tables.job.c.id).where(*choice.unfinished)
        for state, job_id in snapshot.execute(query.order_by(tables.job.c.id)):
            found.setdefault(state, []).append(job_id)
    return found


def hosts(snapshot: Snapshot, jobs: Iterable[FinishedJob]) -> list[str]:
    """Return the names of the hosts on which these jobs ran, as far as they are known, in order."""
    job = tables.job.c
    found = {
        (environment.get("host") or {}).get("hostname")
        for environment in snapshot.execute(
            select(job.environment).where(job.id.in_([each.id for each in jobs])).distinct()
        ).scalars()
        if environment
    }
    return sorted(host for host in found if host is not None)


def swept_fields(snapshot: Snapshot, choice: JobChoice) -> list[str]:
    """Return the fields of which the sweeps of a choice try several values."""
    sweep = tables.sweep.c
    query = select(sweep.grid, sweep.fit).where(sweep.id.in_(choice.sweeps))
    grids = snapshot.execute(query).all() if choice.sweeps else ()
    return [
        path
        for grid, fit in grids
        for path in [*(path for path, values in grid.items() if len(values) > 1), *([fit["axis"]] if fit else [])]
    ]


def _tried(snapshot: Snapshot, sweep_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the place of each job of these sweeps' searches: the sweep's first job, its point, and the value tried."""
    sweep = tables.sweep.c
    searching = select(sweep.id, sweep.fit, sweep.grid).where(sweep.id.in_(sweep_ids), sweep.fit.is_not(None))
    places: dict[int, tuple[int, ...]] = {}
    for sweep_id, fit, grid in snapshot.execute(searching) if sweep_ids else ():
        if fit is None:  # a column of JSON may have its null
            continue
        of_sweep = select(tables.job.c.id, tables.job.c.point).where(tables.job.c.sweep_id == sweep_id)
        jobs = snapshot.execute(of_sweep.order_by(tables.job.c.id)).all()
        paths = [*grid, fit["axis"]]
        places |= {job.id: (jobs[0].id, *(job.point.get(path, 0) for path in paths)) for job in jobs}
    return places


def _check_known(snapshot: Snapshot, column: Any, numbers: Collection[int], what: str) -> None:
    if not numbers:
        return  # nearly always one of both is empty, and needs no statement
    known = select(column).where(column.in_([checked_id(number, what) for number in numbers]))
    unknown = set(numbers) - set(snapshot.execute(known).scalars())
    if unknown:
        raise NotFound(f"There is no {what} {min(unknown)}.")


def last_recorded(job_id: ColumnElement[int]) -> ScalarSelect[Any]:
    """Return, as part of a query over jobs, the number of a job's last attempt that recorded results.

    An attempt that was lost, or was given back to the queue, records nothing.
    """
    attempt = tables.attempt.c
    ended = (attempt.job_id == job_id) & attempt.state.in_(FINISHED_STATES)
    return select(func.max(attempt.number)).where(ended).scalar_subquery()


def recorded_attempts(snapshot: Snapshot, job_ids: Sequence[int]) -> dict[int, int]:
    """Return for each job the number of its last attempt that recorded results; jobs without one are left out.

    An attempt that was lost, or was given back to the queue, records nothing.
    """
    attempt = tables.attempt.c
    query = select(attempt.job_id, func.max(attempt.number)).where(attempt.state.in_(FINISHED_STATES))
    of_jobs = query.where(attempt.job_id.in_(job_ids)).group_by(attempt.job_id)
    return dict(map(tuple, snapshot.execute(of_jobs)))


def recorded_attempt(snapshot: Snapshot, job_id: int, attempt: int | None) -> int | None:
    """Return `attempt` if it recorded results, or, if it is None, the job's last one that did; None if there is none.

    Raises NotFound when there is no such job, or it has had no such attempt.
    """
    row_of(snapshot, tables.job, job_id)
    if attempt is None:
        return recorded_attempts(snapshot, [job_id]).get(job_id)
    check_attempt(snapshot, job_id, attempt)
    of_it = (tables.attempt.c.job_id == job_id) & (tables.attempt.c.number == attempt)
    ended = select(tables.attempt.c.number).where(of_it, tables.attempt.c.state.in_(FINISHED_STATES))
    return snapshot.execute(ended.limit(1)).scalar_one_or_none()


def check_attempt(snapshot: Snapshot, job_id: int, attempt: int) -> None:
    """Raise NotFound when the job has had no attempt of this number."""
    known = select(tables.attempt.c.id).where(tables.attempt.c.job_id == job_id, tables.attempt.c.number == attempt)
    if snapshot.execute(known.limit(1)).one_or_none() is None:
        raise NotFound(f"Job {job_id} has had no attempt {attempt}.")


def measurements(
    snapshot: Snapshot,
    jobs: Iterable[FinishedJob],
    statistic: Statistic,
    metrics: Collection[str] | None = None,
    *,
    compared: bool = False,
) -> list[Measured]:
    """Return the measurements of each job's last recorded attempt, job by job, in the order in which they were made: of
    these metrics, or all; `compared`: medians with the means. Raises InvalidRequest for more than MAX_MEASUREMENTS."""
    query = _of_attempts(statistic, _recorded(jobs))
    if compared:
        query = query.add_columns(_measurement.mean)
    if metrics is not None:
        query = query.where(_measurement.metric.in_(metrics))
    rows = _read(snapshot, query.limit(MAX_MEASUREMENTS + 1))
    if len(rows) > MAX_MEASUREMENTS:
        raise InvalidRequest(
            f"The table would have more than {MAX_MEASUREMENTS} measurements: choose fewer jobs (kind, sweep, job, "
            "label, since, until), or read each job's measurements page by page at /jobs/{id}/measurements."
        )
    return rows


def packed_samples(
    snapshot: Snapshot, jobs: Iterable[FinishedJob], metrics: Collection[tuple[str, str | None]]
) -> dict[Key, bytes]:
    """Return the stored samples of these metrics with their phases, of each job's last recorded attempt."""
    recorded = _recorded(jobs)
    columns = [_measurement[name] for name in ("job_id", "attempt", "unit_index", "case_key", "device_key")]
    names = sorted({name for name, _ in metrics})
    query = select(*columns, _measurement.metric, _measurement.phase, _measurement.samples).where(
        _measurement.metric.in_(names), _measurement.samples.is_not(None)
    )
    return {
        key_of(row): row.samples
        for row in snapshot.execute(query.where(_measurement.job_id.in_(recorded)))
        if row.attempt == recorded[row.job_id] and (row.metric, row.phase) in metrics
    }


def first_measurements(
    snapshot: Snapshot, jobs: Sequence[FinishedJob], statistic: Statistic
) -> tuple[list[FinishedJob], list[Measured], bool]:
    """Return the first jobs, with all their measurements as above, and whether anything is left out.

    At most MAX_BEGINNING measurements are read. If the first job that has any has more, only its completely read cases
    are returned; if it has several units, which may measure the same cases again, all. So are those of searches, whose
    jobs are in another order than rows are read.
    """
    recorded = _recorded(jobs)
    if any(former.id > job.id for former, job in pairwise(jobs)):
        return list(jobs), measurements(snapshot, jobs, statistic), False
    rows = _read(snapshot, _of_attempts(statistic, recorded).limit(MAX_BEGINNING + 1))
    if len(rows) <= MAX_BEGINNING:
        return list(jobs), rows, False
    last = rows[-1]
    if last.job_id != rows[0].job_id:
        whole = [job for job in jobs if job.id < last.job_id]
        return whole, [row for row in rows if row.job_id < last.job_id], True
    whole = [job for job in jobs if job.id <= last.job_id]
    unit = tables.unit.c
    units = select(func.count()).where(unit.job_id == last.job_id, unit.attempt == recorded[last.job_id])
    if snapshot.execute(units).scalar_one() > 1:
        return whole, measurements(snapshot, whole, statistic), len(whole) < len(jobs)
    cut = (last.case_key, last.device_key)
    return whole, [row for row in rows if (row.case_key, row.device_key) != cut], True


def _recorded(jobs: Iterable[FinishedJob]) -> dict[int, int]:
    return {job.id: job.recorded for job in jobs if job.recorded is not None}


def _of_attempts(statistic: Statistic, attempts: Mapping[int, int]) -> Select[Any]:
    """Build a query for the measurements of these attempts, given by job id: job by job, in the order they were made.
    Rows of other attempts of the jobs must not count towards a limit, so the statement itself leaves them out."""
    facts = [_measurement[name] for name in _FACTS]
    beside = ("median_low", "median_high", "min", "max") if statistic == "median" else ()
    interval = [_measurement[name] for name in beside]
    columns = (*facts, cast(_measurement.case, Text), _measurement[statistic], *interval)
    query = select(*columns).where(_measurement.job_id.in_(sorted(attempts)))
    # Nearly all jobs ran once, so one number serves most of them, at less cost than a pair for each.
    usual = Counter(attempts.values()).most_common(1)[0][0] if attempts else 1
    others = sorted((job_id, number) for job_id, number in attempts.items() if number != usual)
    of_attempts = _measurement.attempt == usual
    if others:
        of_attempts &= _measurement.job_id.not_in([job_id for job_id, _ in others])
        of_attempts |= tuple_(_measurement.job_id, _measurement.attempt).in_(others)
    return query.where(of_attempts).order_by(_measurement.job_id, _measurement.id)


def _read(snapshot: Snapshot, query: Select[Any]) -> list[Measured]:
    return [Measured(*row) for row in snapshot.execute(query).all()]


def sides(snapshot: Snapshot, jobs: Iterable[FinishedJob]) -> dict[tuple[int, int, int], str]:
    """Return the side of each unit of comparisons, by (job, attempt, unit index)."""
    unit = tables.unit.c
    query = select(unit.job_id, unit.attempt, unit.unit_index, unit.side).where(unit.side.is_not(None))
    comparisons = [job.id for job in jobs if job.has_sides]
    return {
        (row.job_id, row.attempt, row.unit_index): row.side
        for row in (snapshot.execute(query.where(unit.job_id.in_(comparisons))) if comparisons else ())
    }


def unit_verdicts(snapshot: Snapshot, attempts: Mapping[int, int]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the verdicts of units of these attempts, at most MAX_DOUBTFUL, given by job id: by (job, unit index)."""
    unit = tables.unit.c
    wanted = sorted(attempts)[:MAX_DOUBTFUL]
    query = select(unit.job_id, unit.attempt, unit.unit_index, unit.validity).where(unit.job_id.in_(wanted))
    return {
        (row.job_id, row.unit_index): row.validity
        for row in (snapshot.execute(query) if wanted else ())
        if row.attempt == attempts[row.job_id] and isinstance(row.validity, dict)
    }


def environments(snapshot: Snapshot, jobs: Sequence[FinishedJob], side: str | None = None) -> list[Mapping[str, Any]]:
    """Return the environment of the first unit of each job that recorded one, in the order of the jobs.

    side: only units of this side of a comparison; None: all units.
    """
    unit = tables.unit.c
    place = func.row_number().over(partition_by=(unit.job_id, unit.attempt), order_by=unit.unit_index).label("place")
    query = select(unit.job_id, unit.attempt, unit.environment, place).where(unit.environment.is_not(None))
    if side is not None:
        query = query.where(unit.side == side)
    recorded = _recorded(jobs)
    each = query.where(unit.job_id.in_(recorded)).subquery()
    of_job = {
        row.job_id: row.environment
        for row in snapshot.execute(select(each).where(each.c.place == 1))
        if row.attempt == recorded[row.job_id] and row.environment  # a broken one is empty
    }
    return [of_job[job_id] for job_id in recorded if job_id in of_job]
