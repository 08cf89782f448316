"""New jobs and sweeps, each request answered once: the first half of the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select

from app.errors import IdempotencyMismatch
from app.store import tables
from app.store.engine import Database
from app.store.public import job_dict, sweep_dict
from app.store.records import Idempotency, NewJob, Submitted
from app.store.tables import utc_now

_INSERT_JOB = insert(tables.job).returning(tables.job.c.id, sort_by_parameter_order=True)
_FIRST_ANSWER = select(tables.idempotency_key.c.digest, tables.idempotency_key.c.response).where(
    tables.idempotency_key.c.key == bindparam("key"), tables.idempotency_key.c.route == bindparam("route")
)
NO_PROGRESS: dict[str, Any] = {"done": 0, "total": 0, "message": ""}


class Submission:
    """The part of the queue that jobs come in by."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, new: NewJob, idempotency: Idempotency | None = None) -> Submitted:
        """Queue one job. With an Idempotency-Key, the first answer again, or IdempotencyMismatch for another body."""

        def answer(connection: Connection) -> dict[str, Any]:
            return job_dict(_insert_jobs(connection, [new], sweep_id=None, now=utc_now())[0])

        return self._once(idempotency, answer)

    def submit_sweep(
        self,
        name: str | None,
        labels: dict[str, str],
        base: dict[str, Any],
        grid: dict[str, Any],
        exclude: list[Any],
        jobs: Sequence[NewJob],
        idempotency: Idempotency | None = None,
    ) -> Submitted:
        """Queue a sweep and all of its jobs, or nothing."""

        def answer(connection: Connection) -> dict[str, Any]:
            now = utc_now()
            row = {
                "name": name,
                "labels": labels,
                "base": base,
                "grid": grid,
                "exclude": exclude,
                "created_at": now,
            }
            sweep_id = connection.execute(insert(tables.sweep).returning(tables.sweep.c.id), row).scalar_one()
            _insert_jobs(connection, jobs, sweep_id=sweep_id, now=now)
            return sweep_dict({"id": sweep_id, **row}, {"queued": len(jobs)})

        return self._once(idempotency, answer)

    def first_answer(self, idempotency: Idempotency | None) -> Submitted | None:
        """The answer that a request with this key got before; None when it is new, or comes without a key.

        For what must not be judged again: whether a job was valid was decided with its first answer.
        """
        if idempotency is None:
            return None
        with self._database.read() as connection:
            return _first_answer(connection, idempotency)

    def _once(self, idempotency: Idempotency | None, answer: Callable[[Connection], dict[str, Any]]) -> Submitted:
        with self._database.write() as connection:
            if idempotency is None:
                return Submitted(answer(connection), replayed=False)
            first = _first_answer(connection, idempotency)
            if first is not None:
                return first
            response = answer(connection)
            connection.execute(
                insert(tables.idempotency_key),
                {
                    "key": idempotency.key,
                    "route": idempotency.route,
                    "digest": idempotency.digest,
                    "resource_id": response["id"],
                    "response": response,
                    "created_at": utc_now(),
                },
            )
            return Submitted(response, replayed=False)


def _first_answer(connection: Connection, idempotency: Idempotency) -> Submitted | None:
    identity = {"key": idempotency.key, "route": idempotency.route}
    first = connection.execute(_FIRST_ANSWER, identity).one_or_none()
    if first is None:
        return None
    if first.digest != idempotency.digest:
        raise IdempotencyMismatch(
            f"The Idempotency-Key {idempotency.key!r} came with another body before: use a new key."
        )
    return Submitted(first.response, replayed=True)


def _insert_jobs(
    connection: Connection, jobs: Sequence[NewJob], *, sweep_id: int | None, now: datetime
) -> list[dict[str, Any]]:
    if not jobs:
        return []
    rows = [_row(new, sweep_id, now) for new in jobs]
    for row, job_id in zip(rows, connection.execute(_INSERT_JOB, rows).scalars(), strict=True):
        row["id"] = job_id
    labels = [{"job_id": row["id"], "key": key, "value": value} for row in rows for key, value in row["labels"].items()]
    if labels:
        connection.execute(insert(tables.job_label), labels)
    connection.execute(
        insert(tables.event),
        [
            {"job_id": row["id"], "attempt": 0, "type": "state", "data": {"state": "queued"}, "created_at": now}
            for row in rows
        ],
    )
    return rows


def _row(new: NewJob, sweep_id: int | None, now: datetime) -> dict[str, Any]:
    resources = new.spec.resources()
    return {
        "kind": new.spec.kind,
        "name": new.name,
        "labels": dict(new.labels),
        "state": "queued",
        "spec": new.spec.model_dump(mode="json"),
        "priority": new.priority,
        "attempt": 0,
        "max_attempts": new.max_attempts,
        "timeout_s": new.timeout_s,
        "device_type": resources.device_type,
        "devices": resources.devices,
        "exclusive_host": resources.exclusive_host,
        "requirements": sorted(new.spec.requirements()),
        "progress": NO_PROGRESS,
        "error": None,
        "worker_id": None,
        "sweep_id": sweep_id,
        "environment": None,
        "validity": None,
        "version": 1,
        "created_at": now,
        "started_at": None,
        "finished_at": None,
        "cancel_requested_at": None,
    }
