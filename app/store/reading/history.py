"""The measurements of one case in all jobs that measured it: the SQL statements behind histories.

An index has a case's measurements by metric, so a history reads those of its metric only, however large the jobs are.
"""

from __future__ import annotations

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
"""Most cases of a job, or with a prefix, among which people choose."""

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


def keys_beginning_with(snapshot: Snapshot, prefix: str) -> list[str]:
    """Return the keys of stored cases that begin with a text, at most MAX_CASES."""
    key = _measurement.case_key
    query = select(key).where(key >= prefix, key < prefix + "\U0010ffff").distinct().order_by(key)
    return list(snapshot.execute(query.limit(MAX_CASES)).scalars())


def keys_of_job(snapshot: Snapshot, job_id: int) -> list[str]:
    """Return the keys of the cases that a job measured, in order. Raises NotFound if it never had an attempt."""
    attempt = recorded_attempt(snapshot, job_id, None)
    first = func.min(_measurement.id)
    query = select(_measurement.case_key).where(_measurement.job_id == job_id, _measurement.attempt == attempt)
    return list(snapshot.execute(query.group_by(_measurement.case_key).order_by(first)).scalars())


def coordinates(snapshot: Snapshot, keys: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Return the coordinates of cases by their keys, as the newest measurement of each has them."""
    newest = select(func.max(_measurement.id)).where(_measurement.case_key.in_(keys)).group_by(_measurement.case_key)
    query = select(_measurement.case_key, _measurement.case).where(_measurement.id.in_(newest))
    return dict(map(tuple, snapshot.execute(query)))


def kind(snapshot: Snapshot, key: str) -> str:
    """Return the kind of the newest job that measured the case."""
    newest = select(func.max(_measurement.id)).where(_measurement.case_key == key).scalar_subquery()
    of_job = select(tables.job.c.kind).join(tables.measurement, _measurement.job_id == tables.job.c.id)
    return str(snapshot.execute(of_job.where(_measurement.id == newest)).scalar_one())


def metrics(snapshot: Snapshot, keys: Collection[str]) -> list[tuple[str, str | None]]:
    """Return the metrics that were measured of these cases, each with its phase, in the order of the first time."""
    pair = (_measurement.metric, _measurement.phase)
    query = select(*pair).where(_measurement.case_key.in_(keys)).group_by(*pair).order_by(func.min(_measurement.id))
    return [(metric, phase) for metric, phase in snapshot.execute(query)]


def rows(
    snapshot: Snapshot, keys: Collection[str], metric: tuple[str, str | None], device: str | None
) -> tuple[list[Row], bool]:
    """Return the measurements of a metric, given with its phase, oldest first, and whether MAX_ROWS is too few.

    device: only those on this device; None: on any.
    """
    name, phase = metric
    of_phase = _measurement.phase.is_(None) if phase is None else _measurement.phase == phase
    chosen = and_(_measurement.case_key.in_(keys), _measurement.metric == name, of_phase)
    columns = [_measurement[field] for field in Row._fields[:-3]]
    values = (_measurement.median, _measurement.median_low, _measurement.median_high)
    query = select(*columns, *values).where(chosen)
    if device is not None:
        query = query.where(_measurement.device_key == device)
    newest = snapshot.execute(query.order_by(_measurement.id.desc()).limit(MAX_ROWS + 1)).all()
    return [Row(*row) for row in reversed(newest[:MAX_ROWS])], len(newest) > MAX_ROWS


def jobs(snapshot: Snapshot, job_ids: Sequence[int]) -> dict[int, HistoricJob]:
    """Return those of these jobs that have finished and recorded results, by id."""
    job = tables.job.c
    columns = (job.id, job.kind, job.state, job.spec, job.error, last_recorded(job.id).label("recorded"))
    query = select(*columns, job.finished_at, job.environment)
    chosen = query.where(job.id.in_(job_ids), job.state.in_(FINISHED_STATES), ~job.deleting)
    return {row.id: HistoricJob(*row) for row in snapshot.execute(chosen) if row.recorded is not None}


def baselines(snapshot: Snapshot, keys: Collection[str], job_ids: Collection[int]) -> dict[tuple[int, str], list[str]]:
    """Return the names of the baselines that these cases of these jobs are in, by job and device."""
    case = tables.baseline_case.c
    query = select(case.job_id, case.device_key, case.baseline).where(case.job_id.in_(job_ids), case.case_key.in_(keys))
    names: dict[tuple[int, str], list[str]] = {}
    for job_id, device_key, name in snapshot.execute(query.distinct().order_by(case.baseline)):
        names.setdefault((job_id, device_key), []).append(name)
    return names
