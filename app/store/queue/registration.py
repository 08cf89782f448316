"""Workers and their signs of life."""

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from sqlalchemy import Connection, bindparam, insert, select, update

from app.specs._schema import SCHEMA, fingerprint
from app.states import LivingState, WorkerState
from app.store import service_settings, tables
from app.store.database.engine import Database
from app.store.queue.hosts import known_host
from app.store.tables import utc_now
from flopwatch.version import own_version

ALIVE = get_args(LivingState)

_worker = tables.worker.c
_CHANGE = update(tables.worker).where(_worker.id == bindparam("worker_id"))
_BEAT = _CHANGE.values(beat=_worker.beat + 1)
_LOSE = _CHANGE.where(_worker.beat == bindparam("seen_beat"), _worker.state.in_(ALIVE)).values(state="lost")
_LIVING = select(_worker.id, _worker.hostname, _worker.pid).where(_worker.state.in_(ALIVE)).order_by(_worker.id)
_SEE_HOST = update(tables.known_host).where(tables.known_host.c.key == bindparam("host"))
_ALIVE = select(_worker.id, _worker.beat).where(_worker.state.in_(ALIVE))


class Registration:
    """The workers of one database. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register_worker(
        self,
        worker_id: str,
        hostname: str,
        pid: int,
        kinds: Iterable[str],
        capabilities: Iterable[str],
        devices: Sequence[dict[str, Any]],
        versions: dict[str, Any],
        state: LivingState = "active",
        unfit: dict[str, Any] | None = None,
    ) -> None:
        """Add a worker, or update what it can run.

        devices: one object each, with a "type"; those of type "cuda" are GPUs. capabilities: "family:name".
        """
        now = utc_now()
        host = known_host(kinds, capabilities, devices)
        row: dict[str, Any] = {
            "hostname": hostname,
            "pid": pid,
            "state": state,
            "schema_number": SCHEMA,
            "unfit": unfit,
            "kinds": host["kinds"],
            "capabilities": host["capabilities"],
            "devices": list(devices),
            "versions": dict(versions),
            "registered_at": now,
            "last_seen_at": now,
        }
        with self._database.write() as connection:
            if connection.execute(_BEAT, {"worker_id": worker_id, **row}).rowcount == 0:
                connection.execute(insert(tables.worker), {"id": worker_id, "beat": 0, **row})
            if connection.execute(_SEE_HOST, {"host": host["key"], "last_seen_at": now}).rowcount == 0:
                connection.execute(insert(tables.known_host), {**host, "last_seen_at": now})

    def set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        """Set a worker's state. active: it takes jobs; unfit: none for now; draining: no new ones; stopped: it ended in
        order; lost: it is silent."""
        with self._database.write() as connection:
            connection.execute(_CHANGE, {"worker_id": worker_id, "state": state, "last_seen_at": utc_now()})

    def worker_beats(self) -> dict[str, int]:
        """Return the heartbeat counter of every living worker."""
        with self._database.read() as connection:
            return {row.id: row.beat for row in connection.execute(_ALIVE)}

    def lose_worker(self, worker_id: str, seen_beat: int) -> bool:
        """Mark a worker as lost, unless it has beaten since `seen_beat`."""
        with self._database.write() as connection:
            seen = {"worker_id": worker_id, "seen_beat": seen_beat}
            return connection.execute(_LOSE, seen).rowcount == 1


def announce_server(database: Database) -> None:
    """Store what the server is, which started last, for workers to compare themselves with."""
    own = {"version": own_version(), "schema_number": SCHEMA, "fingerprint": fingerprint()}
    service_settings.keep(database, service_settings.SERVER, own)


def server(connection: Connection) -> dict[str, Any] | None:
    """Return the last server's {"version", "schema_number", "fingerprint"}; None before release 0.2.0."""
    known: dict[str, Any] | None = service_settings.get(connection, service_settings.SERVER)
    return known


def beat(
    connection: Connection,
    worker_id: str,
    state: LivingState,
    readings: dict[str, Any] | None = None,
    unfit: dict[str, Any] | None = None,
) -> bool:
    """Record a worker's heartbeat, its state, why it is unfit and, unless None, the readings of its devices, in the
    transaction that renews its claims. One that was marked lost lives again. Returns False if its row was pruned, since
    it was silent for so long: it must register again."""
    seen: dict[str, Any] = {"worker_id": worker_id, "state": state, "unfit": unfit, "last_seen_at": utc_now()}
    if readings is not None:
        seen["readings"] = readings
    return connection.execute(_BEAT, seen).rowcount == 1


def living_workers(connection: Connection) -> list[str]:
    """Return the ids of living workers, without those of this host that were killed."""
    return [row.id for row in connection.execute(_LIVING) if row.hostname != socket.gethostname() or _runs(row.pid)]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
