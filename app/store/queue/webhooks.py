"""Webhooks: which URL to call when a job or sweep ends, and the delivery's state. What is sent, and how, is in
app/api/notifying.py.

    waiting ─ the job has ended ─→ pending ─→ delivered | failed
       ↑                              │
       └── retry, resume ─────────────┴── from every state

A row is written with its job. A server that dies amid a delivery leaves it pending, and it is tried again: a receiver
gets each end at least once.
"""

import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, exists, insert, or_, select, update

from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.engine import Database
from app.store.public import rfc3339
from app.store.queue import sweeps
from app.store.tables import utc_now

TRY_S = 60.0
"""Seconds that a server has for one try; afterwards another one begins it."""
RETRY_AFTER_S = (5, 30, 5 * 60, 30 * 60, 2 * 3600, 6 * 3600, 12 * 3600)
"""Seconds between tries; after the last one the webhook has failed."""
AT_ONCE = 16

_hook, _job, _sweep = tables.webhook.c, tables.job.c, tables.sweep.c
_UNFINISHED = _job.state.not_in(FINISHED_STATES)
_ENDED = or_(
    exists().where(_job.id == _hook.job_id, ~_UNFINISHED),
    _hook.sweep_id.is_not(None) & ~exists().where(_job.sweep_id == _hook.sweep_id, _UNFINISHED),
)
_WAITING = select(_hook.id).where(tables.IS_OPEN, _hook.state == "waiting", _ENDED).limit(1000)


@dataclass(frozen=True)
class Delivery:
    """One message to send now."""

    id: int
    url: str
    message_id: str
    tries: int
    """Those before this one."""
    message: dict[str, Any]


def register(
    connection: Connection, url: str | None, *, job_id: int | None = None, sweep_id: int | None = None
) -> None:
    """Let the end of a new job or sweep be told to this address; None: to nobody."""
    if url is not None:
        owner = {"job_id": job_id, "sweep_id": sweep_id, "url": url}
        connection.execute(insert(tables.webhook), {**owner, **_waiting()})


def expect_again(connection: Connection, *, job_id: int | None = None, sweep_id: int | None = None) -> None:
    """Let the next end be told, too: the job, and with it a part of its sweep, was queued once more."""
    whose = _hook.job_id.in_([job_id]) | _hook.sweep_id.in_([sweep_id])  # unlike `==`, None finds nothing
    connection.execute(update(tables.webhook).where(whose).values(**_waiting()))


class Webhooks:
    """The webhooks of one database. Servers share the work: what one has begun, no other begins within TRY_S."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self) -> list[Delivery]:
        """Return messages that are due, some at a time; they are due again after TRY_S."""
        now = utc_now()
        due = select(_hook.id).where(tables.IS_OPEN, _hook.state == "pending", _hook.due_at <= now)
        with self._database.read() as connection:  # nearly always there is nothing to do
            ended = list(connection.execute(_WAITING).scalars())
            if not ended and connection.execute(due.limit(1)).first() is None:
                return []
        with self._database.write() as connection:
            still = _hook.id.in_(ended) & (_hook.state == "waiting") & _ENDED
            connection.execute(update(tables.webhook).where(still).values(state="pending", due_at=now))
            ids = list(connection.execute(due.order_by(_hook.due_at).limit(AT_ONCE)).scalars())
            begun = update(tables.webhook).where(_hook.id.in_(ids)).values(due_at=now + timedelta(seconds=TRY_S))
            connection.execute(begun)
            rows = connection.execute(select(tables.webhook).where(_hook.id.in_(ids)).order_by(_hook.id)).all()
            return [Delivery(row.id, row.url, row.message_id, row.tries, _message(connection, row)) for row in rows]

    def end(self, tried: Delivery, *, delivered: bool, again: bool = True) -> None:
        """Record how a try has ended, and when the next one is due if it failed and another may succeed (`again`)."""
        tries = tried.tries + 1
        values: dict[str, Any] = {"tries": tries}
        if delivered:
            values["state"] = "delivered"
        elif not again or tries > len(RETRY_AFTER_S):
            values["state"] = "failed"
        else:
            values["due_at"] = utc_now() + timedelta(seconds=RETRY_AFTER_S[tries - 1])
        same = (_hook.id == tried.id) & (_hook.state == "pending") & (_hook.message_id == tried.message_id)
        with self._database.write() as connection:
            connection.execute(update(tables.webhook).where(same).values(**values))


def _waiting() -> dict[str, Any]:
    return {"state": "waiting", "message_id": f"msg_{secrets.token_hex(12)}", "tries": 0, "due_at": None}


def _message(connection: Connection, hook: Any) -> dict[str, Any]:
    if hook.sweep_id is not None:
        sweep = connection.execute(select(_sweep.name, _sweep.labels).where(_sweep.id == hook.sweep_id)).one()
        last = select(_job.finished_at).where(_job.sweep_id == hook.sweep_id).order_by(_job.finished_at.desc()).limit(1)
        counts = sweeps.counts(connection, [hook.sweep_id]).get(hook.sweep_id, {})
        data = {"id": hook.sweep_id, "name": sweep.name, "labels": sweep.labels, "counts": counts}
        at = connection.execute(last).scalar_one_or_none() or utc_now()
        return {"type": "sweep.finished", "timestamp": rfc3339(at), "data": data}
    columns = (_job.id, _job.kind, _job.name, _job.labels, _job.state, _job.attempt, _job.error)
    job = connection.execute(select(*columns, _job.finished_at).where(_job.id == hook.job_id)).mappings().one()
    data = {column.name: job[column] for column in columns}
    data["error"] = job["error"] and {name: job["error"].get(name) for name in ("code", "detail")}
    return {"type": "job.finished", "timestamp": rfc3339(job["finished_at"]), "data": data}
