"""Reads what /metrics tells about a database, in one snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from app.states import JOB_STATES, WORKER_STATES
from app.store import tables
from app.store.database.engine import Database
from app.store.queue import tallies
from app.store.queue.registration import ALIVE
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
    workers_readings: Sequence[tuple[str, str, Mapping[str, Any]]]
    """Of each living worker: id, name of its host, readings of its devices."""


def read(database: Database) -> Snapshot:
    """Read the numbers as they are now."""
    with database.read() as connection:
        counted: dict[str, list[tuple[str, str, int]]] = {}
        for name, kind, outcome, number in tallies.all_of(connection):
            counted.setdefault(name, []).append((kind, outcome, number))
        living = select(_worker.id, _worker.hostname, _worker.readings).where(_worker.state.in_(ALIVE))
        return Snapshot(
            jobs=_by_state(connection, _job.state, JOB_STATES),
            oldest_s={
                "queued": _age_s(connection, "queued", _job.created_at),
                "running": _age_s(connection, "running", _job.started_at),
            },
            workers=_by_state(connection, _worker.state, WORKER_STATES),
            webhooks=_by_state(connection, _hook.state, ("waiting", "pending"), tables.IS_OPEN),
            tallies=counted,
            workers_readings=[
                (row.id, row.hostname, row.readings if isinstance(row.readings, dict) else {})
                for row in connection.execute(living.order_by(_worker.id))
            ],
        )


def _by_state(connection: Connection, state: Any, states: Sequence[str], *where: Any) -> dict[str, int]:
    found = dict(map(tuple, connection.execute(select(state, func.count()).where(*where).group_by(state)).all()))
    return {one: found.get(one, 0) for one in states}


def _age_s(connection: Connection, state: str, since: Any) -> float:
    """Return the age of the oldest job in a state, by this host's wall clock."""
    oldest: datetime | None = connection.execute(select(func.min(since)).where(_job.state == state)).scalar_one()
    return 0.0 if oldest is None else max(0.0, (utc_now() - oldest).total_seconds())
