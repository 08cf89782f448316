"""The measurements of one case in all jobs that measured it: the SQL statements behind histories.

An index has a case's measurements by metric, so a history reads those of its metric only, however large the jobs are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import and_, func, select

from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.engine import Snapshot
from app.store.reading.measurements import FinishedJob, last_recorded, recorded_attempt

MAX_ROWS = 50_000
"""Most measurements of a history: those of the newest jobs are read."""
MAX_CASES = 200
"""Most cases with a prefix, among which people choose."""

_measurement = tables.measurement.c


class Row(NamedTuple):
    """A process's measurement of the case."""

    job_id: int
    attempt: int
    unit_index: int
    case_key: str
    device_key: str
    validity: str | None
    unit: str
    outcome: str
    n: int | None
    std: float | None
    value: float | None
    """The median of its samples."""
    low: float | None
    high: float | None


@dataclass(frozen=True)
class HistoricJob(FinishedJob):
    """A finished job that measured the case."""

    finished_at: datetime | None = None
    environment: Mapping[str, Any] | None = None


def cases_beginning_with(snapshot: Snapshot, prefix: str) -> dict[str, Mapping[str, Any]]:
    """Return the coordinates of stored cases whose keys begin with a text, by key, at most MAX_CASES."""
    key = _measurement.case_key
    query = select(key).where(key >= prefix, key < prefix + "\U0010ffff").distinct().order_by(key)
    keys = snapshot.execute(query.limit(MAX_CASES)).scalars().all()
    return {key: snapshot.execute(_any_of(key, _measurement.case)).scalar_one() for key in keys}


def cases_of_job(snapshot: Snapshot, job_id: int) -> dict[str, Mapping[str, Any]]:
    """Return the coordinates of the cases that a job measured, by key, in order. Raises NotFound for no such job."""
    attempt = recorded_attempt(snapshot, job_id, None)
    first = select(func.min(_measurement.id)).where(_measurement.job_id == job_id, _measurement.attempt == attempt)
    cases = select(_measurement.case_key, _measurement.case).order_by(_measurement.id)
    return dict(map(tuple, snapshot.execute(cases.where(_measurement.id.in_(first.group_by(_measurement.case_key))))))


def kind(snapshot: Snapshot, key: str) -> str:
    """Return the kind of a job that measured the case; of a comparison, that of its sides."""
    job_id = snapshot.execute(_any_of(key, _measurement.job_id)).scalar_one()
    job = snapshot.execute(select(tables.job.c.kind, tables.job.c.spec).where(tables.job.c.id == job_id)).one()
    sides = (side["kind"] for side in job.spec.values() if isinstance(side, Mapping) and "kind" in side)
    return str(next(sides, job.kind))


def _any_of(key: str, column: Any) -> Any:
    """Build a query for a column of a measurement of the case: the newest one of some metric, as the index ends."""
    order = (_measurement.metric.desc(), _measurement.phase.desc(), _measurement.id.desc())
    return select(column).where(_measurement.case_key == key).order_by(*order).limit(1)


def metrics(snapshot: Snapshot, key: str) -> list[tuple[str, str | None]]:
    """Return the metrics that were measured of this case, each with its phase, in the order of the first time."""
    pair = (_measurement.metric, _measurement.phase)
    query = select(*pair).where(_measurement.case_key == key).group_by(*pair).order_by(func.min(_measurement.id))
    return [(metric, phase) for metric, phase in snapshot.execute(query)]


def rows(
    snapshot: Snapshot, key: str, metric: tuple[str, str | None], device: str | None, most_jobs: int
) -> tuple[list[Row], bool]:
    """Return the measurements of a metric, given with its phase, oldest first, and whether some are left out: those on
    a device (None: any), of the newest `most_jobs`."""
    name, phase = metric
    of_phase = _measurement.phase.is_(None) if phase is None else _measurement.phase == phase
    chosen = and_(_measurement.case_key == key, _measurement.metric == name, of_phase)
    columns = [_measurement[field] for field in Row._fields[:-3]]
    values = (_measurement.median, _measurement.median_low, _measurement.median_high)
    query = select(*columns, *values).where(chosen)
    if device is not None:
        query = query.where(_measurement.device_key == device)
    newest: list[Row] = []
    of_jobs: set[int] = set()
    # The index has those of a key in this order, so that only those that are read are looked at.
    result = snapshot.execute(query.order_by(_measurement.id.desc()), execution_options={"yield_per": 1000})
    for row in result:
        of_jobs.add(row.job_id)
        if len(of_jobs) > most_jobs or len(newest) == MAX_ROWS:
            result.close()
            # Rows of the oldest job may be missing, if its last one read is followed by another one of it.
            return [read for read in reversed(newest) if read.job_id != row.job_id], True
        newest.append(Row._make(row))
    return newest[::-1], False


def jobs(snapshot: Snapshot, job_ids: Sequence[int]) -> dict[int, HistoricJob]:
    """Return those of these jobs that have finished and recorded results, by id."""
    job = tables.job.c
    columns = (job.id, job.kind, job.state, job.spec, job.error, last_recorded(job.id).label("recorded"))
    query = select(*columns, job.finished_at, job.environment)
    chosen = query.where(job.id.in_(job_ids), job.state.in_(FINISHED_STATES))
    return {row.id: HistoricJob(*row) for row in snapshot.execute(chosen) if row.recorded is not None}


def baselines(snapshot: Snapshot, key: str, job_ids: Collection[int]) -> dict[tuple[int, str], list[str]]:
    """Return the names of the baselines that the case of these jobs is in, by job and device."""
    case = tables.baseline_case.c
    query = select(case.job_id, case.device_key, case.baseline).where(case.job_id.in_(job_ids), case.case_key == key)
    names: dict[tuple[int, str], list[str]] = {}
    for job_id, device_key, name in snapshot.execute(query.distinct().order_by(case.baseline)):
        names.setdefault((job_id, device_key), []).append(name)
    return names
