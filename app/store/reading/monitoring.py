"""Reads what /metrics tells about a database, in one snapshot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from app.states import JOB_STATES, WORKER_STATES
from app.store import tables
from app.store.database.engine import Database
from app.store.queue import tallies
from app.store.queue.registration import ALIVE
from app.store.queue.sharing import number_of_devices
from app.store.queue.tallies import Histogram
from app.store.tables import utc_now

_job, _worker, _hook = tables.job.c, tables.worker.c, tables.webhook.c


@dataclass(frozen=True)
class Snapshot:
    """The numbers of one moment."""

    jobs: Mapping[str, int]
    """By state; and so are the others."""
    oldest_s: Mapping[str, float]
    """Seconds since the oldest queued job was submitted, and the oldest running one started; 0 without one."""
    workers: Mapping[str, int]
    webhooks: Mapping[str, int]
    tallies: Mapping[str, Sequence[tuple[str, str, int]]]
    """By name: kind, outcome, number."""
    histograms: Mapping[tuple[str, str, str], Histogram]
    """By name, kind, outcome."""
    pending: int
    """Queued jobs that wait in a cluster's queue."""
    devices: Sequence[tuple[str, str, int, int]]
    """Of each host with devices of its own: id of its first living worker, name, their number, how many are in use."""
    workers_readings: Sequence[tuple[str, str, Mapping[str, Any]]]
    """Of each living worker: id, name of its host, readings of its devices."""


def read(database: Database) -> Snapshot:
    with database.read() as connection:
        counted: dict[str, list[tuple[str, str, int]]] = {}
        numbers, histograms = tallies.all_of(connection)
        for name, kind, outcome, number in numbers:
            counted.setdefault(name, []).append((kind, outcome, number))
        living = select(_worker.id, _worker.hostname, _worker.readings).where(_worker.state.in_(ALIVE))
        return Snapshot(
            jobs=by_state(connection, _job.state, JOB_STATES),
            oldest_s={
                "queued": _age_s(connection, "queued", _job.created_at),
                "running": _age_s(connection, "running", _job.started_at),
            },
            workers=by_state(connection, _worker.state, WORKER_STATES),
            webhooks=by_state(connection, _hook.state, ("waiting", "pending"), tables.IS_OPEN),
            tallies=counted,
            histograms=histograms,
            pending=_pending(connection),
            devices=_devices(connection),
            workers_readings=[
                (row.id, row.hostname, row.readings if isinstance(row.readings, dict) else {})
                for row in connection.execute(living.order_by(_worker.id))
            ],
        )


def by_state(connection: Connection, state: Any, states: Sequence[str], *where: Any) -> dict[str, int]:
    """Return the number of rows in each of these states."""
    found = dict(map(tuple, connection.execute(select(state, func.count()).where(*where).group_by(state)).all()))
    return {one: found.get(one, 0) for one in states}


def _age_s(connection: Connection, state: str, since: Any) -> float:
    """Return the age of the oldest job in a state, by this host's wall clock."""
    oldest: datetime | None = connection.execute(select(func.min(since)).where(_job.state == state)).scalar_one()
    return 0.0 if oldest is None else max(0.0, (utc_now() - oldest).total_seconds())


def _pending(connection: Connection) -> int:
    query = select(func.count()).select_from(tables.job)
    return connection.execute(query.where(_job.state == "queued", _job.waiting_reason.is_not(None))).scalar_one()


def _devices(connection: Connection) -> list[tuple[str, str, int, int]]:
    """A host without GPUs has one device, its CPU. A job on the CPU has its host alone, and so all its devices."""
    columns = (_job.worker_id, _job.device_type, _job.devices, _job.requirements, _job.exclusive_host)
    running: dict[str, list[RowMapping]] = {}
    query = select(*columns).where(_job.state == "running", _job.device_type != "none")
    for job in connection.execute(query).mappings():
        running.setdefault(job["worker_id"], []).append(job)
    found: dict[str, tuple[str, set[object], list[RowMapping]]] = {}
    living = select(_worker.id, _worker.hostname, _worker.devices).where(_worker.state.in_(ALIVE))
    for row in connection.execute(living.order_by(_worker.id)):
        devices = [one for one in row.devices if isinstance(one, dict)]
        if not any(one.get("type") == "slurm" for one in devices):
            _, gpus, jobs = found.setdefault(row.hostname, (row.id, set(), []))  # workers of one host share its devices
            gpus.update(one.get("uuid") or place for place, one in enumerate(devices) if one.get("type") == "cuda")
            jobs += running.get(row.id, [])
    hosts = []
    for host, (worker, gpus, jobs) in found.items():
        total = max(len(gpus), 1)
        takes_all = any(job["device_type"] == "cpu" or job["exclusive_host"] for job in jobs)
        hosts.append((worker, host, total, total if takes_all else min(total, sum(map(number_of_devices, jobs)))))
    return hosts
