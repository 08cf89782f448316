"""Makes rows of new jobs, and keeps the first answer to each request with an Idempotency-Key. The queue opens the
transactions."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Dialect, bindparam, column, func, insert, select, table, update

from app.errors import Gone, IdempotencyMismatch, KeyTaken, QueueFull
from app.specs import in_lists
from app.specs._schema import SCHEMA, name_of
from app.store import tables
from app.store.files.uploads import record_code_use
from app.store.public import NO_PROGRESS
from app.store.records import Idempotency, NewJob, Submitted
from app.store.tables import utc_now

_key = tables.idempotency_key.c
INSERT_BOUND = insert(table("job", *map(column, tables.job.c.keys())))
"""Inserts rows that `bound` made: its columns have no types, which would bind the values again."""
_INSERT_JOB = insert(tables.job).returning(tables.job.c.id, sort_by_parameter_order=True)
_FIRST_ANSWER = select(_key.digest, _key.response, _key.resource_id, _key.awaited).where(
    _key.key == bindparam("key"), _key.route == bindparam("route")
)
_KEEP_AWAITED = (
    update(tables.idempotency_key)
    .where(_key.key == bindparam("of_key"), _key.route == bindparam("of_route"), _key.awaited)
    .values(awaited=False)
)
_KEY_HOLDER = select(tables.job.c.id, tables.job.c.state).where(
    tables.job.c.unique_key == bindparam("unique_key"), tables.HOLDS_ITS_KEY
)
QUEUED_EVENT: dict[str, Any] = {"state": "queued"}
"""The first event of every job, of type `state`."""

RETRY_QUEUE_S = 60
"""Seconds after which a client whose queue was full should try again."""

SPEC_COLUMNS = ("kind", "spec", "summary", "device_type", "devices", "exclusive_host", "requirements", "point")
"""Columns of a job that follow from its spec and its point: jobs with the same spec have the same values."""


def job_row(new: NewJob, sweep_id: int | None, now: datetime) -> dict[str, Any]:
    """Make the row of a new job for the table `job`, without its id."""
    resources = new.spec.resources()
    options = {name: value for name, value in vars(new).items() if name not in ("spec", "notify_url")}
    return {
        **options,
        "kind": new.spec.kind,
        "spec": new.spec.drawn().model_dump(mode="json"),
        "summary": in_lists(new.spec),
        "device_type": resources.device_type,
        "devices": resources.devices,
        "exclusive_host": resources.exclusive_host,
        "requirements": sorted(new.spec.requirements() | {name_of(SCHEMA)}),
        "sweep_id": sweep_id,
        **queued(now),
    }


def bound(dialect: Dialect, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that `job_row` made with values as the driver takes them, for `INSERT_BOUND`.

    Binding thousands of rows takes long, so sweeps do it before their transaction, in which nobody else can write.
    """
    binds = {its.name: its.type.dialect_impl(dialect).bind_processor(dialect) for its in tables.job.c}
    return [{name: bind(row[name]) if (bind := binds[name]) else row[name] for name in row} for row in rows]


INITIAL_COLUMNS: dict[str, Any] = {
    "state": "queued",
    "progress": NO_PROGRESS,
    "error": None,
    "worker_id": None,
    "waiting_reason": None,
    "environment": None,
    "validity": None,
    "started_at": None,
    "finished_at": None,
    "cancel_requested_at": None,
    "deleting": False,
}
"""The columns that are the same for every job that was just submitted, or retried."""


def queued(now: datetime) -> dict[str, Any]:
    """Return the columns that are the same for every job just submitted."""
    return {**INITIAL_COLUMNS, "note": None, "attempt": 0, "version": 1, "created_at": now}


def check_room(connection: Connection, submitter: str | None, most: int | None, more: int, *, stored: int = 0) -> None:
    """Raise QueueFull if a submitter (None: all of whom no name is known) would have more than `most` queued jobs with
    `more` jobs, of which `stored` are in the table already. `connection` has the lock of writers, and stores them."""
    if most is None:
        return
    job = tables.job.c
    query = select(func.count()).where(job.state == "queued", job.submitted_by == submitter)
    queued = connection.execute(query).scalar_one() - stored
    if queued + more > most:
        whose = f"{submitter} has" if submitter else "Clients that name no user have"
        raise QueueFull(
            f"{whose} {queued} queued jobs, and {more} more would exceed {most} (FLOPWATCH_MAX_QUEUED_JOBS): wait for "
            "some of them, or cancel some.",
            RETRY_QUEUE_S,
        )


def check_key(connection: Connection, unique_key: str | None) -> None:
    """Raise KeyTaken if a job with this key is queued or running; a unique index would say it with less help."""
    if unique_key is None:
        return
    holder = connection.execute(_KEY_HOLDER, {"unique_key": unique_key}).one_or_none()
    if holder is not None:
        raise KeyTaken(unique_key, holder.id, holder.state)


def insert_jobs(connection: Connection, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert jobs with their labels and their first event; returns the rows with their ids. Raises Conflict if an
    uploaded file that one of them names is gone."""
    if not rows:
        return []
    ids = connection.execute(_INSERT_JOB, rows).scalars()
    inserted = [{**row, "id": job_id} for row, job_id in zip(rows, ids, strict=True)]
    labels = [
        {"job_id": row["id"], "key": key, "value": value} for row in inserted for key, value in row["labels"].items()
    ]
    if labels:
        connection.execute(insert(tables.job_label), labels)
    record_code_use(connection, inserted)
    connection.execute(
        insert(tables.event),
        [
            {"job_id": row["id"], "attempt": 0, "type": "state", "data": QUEUED_EVENT, "created_at": row["created_at"]}
            for row in inserted
        ],
    )
    return inserted


def first_answer(connection: Connection, idempotency: Idempotency) -> Submitted | None:
    """Return the earlier answer to a request with this key; None if the key is new.

    Raises IdempotencyMismatch if the earlier request had another body, and Gone if its job or sweep was deleted.
    """
    first = connection.execute(_FIRST_ANSWER, _identity(idempotency)).one_or_none()
    if first is None:
        return None
    if first.digest != idempotency.digest:
        raise IdempotencyMismatch(
            f"The Idempotency-Key {idempotency.key!r} came with another body before: use a new key."
        )
    # A sweep's answer has its grid.
    table = tables.sweep if "grid" in first.response else tables.job
    if connection.execute(select(table.c.id).where(table.c.id == first.resource_id)).first() is None:
        raise Gone(
            f"The {table.name} {first.resource_id}, which a request with the Idempotency-Key {idempotency.key!r} made, "
            "was deleted: use a new key to submit it again.",
            {f"{table.name}_id": first.resource_id},
        )
    return Submitted(first.response, replayed=True, awaited=first.awaited)


def answer_once(
    connection: Connection, idempotency: Idempotency | None, answer: Callable[[], dict[str, Any]]
) -> Submitted:
    """Return the first answer to this key if there was one; else call `answer` and keep its result as the first."""
    if idempotency is None:
        return Submitted(answer(), replayed=False)
    first = first_answer(connection, idempotency)
    if first is not None:
        return first
    response = answer()
    row = {
        **_identity(idempotency),
        "digest": idempotency.digest,
        "resource_id": response["id"],
        "response": response,
        "awaited": idempotency.awaits,
        "created_at": utc_now(),
    }
    connection.execute(insert(tables.idempotency_key), row)
    return Submitted(response, replayed=False, awaited=idempotency.awaits)


def keep_awaited(connection: Connection, idempotency: Idempotency, response: dict[str, Any]) -> dict[str, Any]:
    """Make `response` the first answer to a request that waited, unless it has one by now; returns the first answer."""
    kept = connection.execute(
        _KEEP_AWAITED, {"of_key": idempotency.key, "of_route": idempotency.route, "response": response}
    )
    if kept.rowcount:
        return response
    first = connection.execute(_FIRST_ANSWER, _identity(idempotency)).one_or_none()
    return response if first is None else dict(first.response)


def _identity(idempotency: Idempotency) -> dict[str, str]:
    return {"key": idempotency.key, "route": idempotency.route}
