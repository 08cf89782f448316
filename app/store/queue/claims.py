"""Chooses the queued job that a worker runs next.

The order is priority, then submission. The first job that the worker's host could run if it were empty decides: when it
does not fit now, the worker claims nothing, so that narrow jobs cannot keep a wide one waiting for ever. The worker
passes over jobs of another kind, jobs for devices that the host does not have, and jobs that need a name (a model, an
attention implementation) which another worker has and this one lacks. That worker may have stopped: the job then waits
for one like it, and says so (waiting.py). The runner refuses a name that no worker ever had, as `unsupported`. A job
with uploaded code waits for a worker that may run it, whether there ever was one or not; and a job of a newer server
waits for a worker that can read its spec.

A worker claims jobs that need no device first, and runs them beside its other jobs. No worker claims a job of a paused
kind, and such a job delays no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    literal_column,
    or_,
    select,
)

from app.specs._base import NODES
from app.specs._code import RUNS_CODE
from app.specs._schema import is_name, names_up_to
from app.store import tables
from app.store.queue.hosts import Host, Needs, known_hosts
from app.store.queue.pausing import paused_kinds, unpaused
from app.store.records import Offer

FIRST, NEXT = 4, 200
"""Number of rows of the first page and of each further one. Nearly always the first row decides."""

_job = tables.job.c
# This is a literal: with a bound value SQLite could not tell that the partial index ix_job_claimable holds the answer.
QUEUED: ColumnElement[bool] = _job.state == literal_column("'queued'")
UNCLAIMED = and_(QUEUED, _job.waiting_reason.is_(None))
"""The condition for jobs that a worker may claim: the other queued ones wait in a cluster's queue."""
_ORDER = (_job.priority.desc(), _job.id)
_KINDS: BindParameter[Any] = bindparam("kinds", expanding=True)


def _candidates(index: str, *conditions: ColumnElement[bool]) -> Select[Any]:
    return (
        select(
            _job.id,
            _job.priority,
            _job.kind,
            _job.device_type,
            _job.devices,
            _job.exclusive_host,
            _job.requirements,
        )
        # Without the hint SQLite takes ix_job_state_id and sorts the whole queue for every claim: 30 ms with 100 000
        # queued.
        .with_hint(tables.job, f"INDEXED BY {index}", "sqlite")
        .where(UNCLAIMED, _job.kind.in_(_KINDS), *conditions)
        .order_by(*_ORDER)
        .limit(bindparam("limit"))
    )


# Jobs that need no device have a lane of their own, since they take no device from other jobs and do not wait for any.
_NEEDS_DEVICE = _job.device_type != literal_column("'none'")
NO_DEVICE: ColumnElement[bool] = _job.device_type == literal_column("'none'")
_ON_CPU_HOST = and_(_NEEDS_DEVICE, _job.device_type != "cuda")
_ON_GPU_HOST = and_(_NEEDS_DEVICE, or_(_job.device_type == "cpu", _job.devices <= bindparam("total_gpus")))
_BEYOND = or_(
    _job.priority < bindparam("last_priority"),
    and_(_job.priority == bindparam("last_priority"), _job.id > bindparam("last_id")),
)


@dataclass(frozen=True)
class Lane:
    """Queued jobs that one host could run, in pages: nearly always the first page decides."""

    first_page: Select[Any]
    next_page: Select[Any]


def _lane(index: str, condition: ColumnElement[bool]) -> Lane:
    return Lane(_candidates(index, condition), _candidates(index, condition, _BEYOND))


DEVICELESS = _lane("ix_job_deviceless", NO_DEVICE)
ON_CPU_HOST = _lane("ix_job_claimable", _ON_CPU_HOST)
ON_GPU_HOST = _lane("ix_job_claimable", _ON_GPU_HOST)


def next_job(connection: Connection, worker_id: str, offer: Offer) -> int | None:
    """Return the id of the job that the worker must run next; None if it can start none now."""
    names = offer.capabilities | names_up_to(offer.schema_number)
    offer = replace(offer, kinds=unpaused(offer.kinds, paused_kinds(connection)), capabilities=names)
    if not offer.kinds:
        return None
    if offer.deviceless:
        job = _first_runnable(connection, DEVICELESS, worker_id, offer)
        if job is not None and (offer.idle or not job.exclusive_host):
            return int(job.id)
    job = _first_runnable(connection, ON_GPU_HOST if offer.total_gpus else ON_CPU_HOST, worker_id, offer)
    return int(job.id) if job is not None and _fits_now(job, offer) else None


def _first_runnable(connection: Connection, lane: Lane, worker_id: str, offer: Offer) -> Row[Any] | None:
    """Return the first job of the lane that this worker could run if its host were idle."""
    values: dict[str, Any] = {"kinds": sorted(offer.kinds), "limit": FIRST, "total_gpus": offer.total_gpus}
    others: list[Host] | None = None
    page = connection.execute(lane.first_page, values).all()
    while True:
        for job in page:
            if offer.capabilities.issuperset(job.requirements):
                return job
            if any(waits_for(name) and name not in offer.capabilities for name in job.requirements):
                continue
            if others is None:
                others = known_hosts(connection, other_than=worker_id)
            needs = Needs.of(job._mapping)
            needs = replace(needs, requirements=frozenset(name for name in needs.requirements if not is_name(name)))
            if not any(other.could_run(needs) for other in others):
                return job
        if len(page) < values["limit"]:
            return None
        values |= {"limit": NEXT, "last_priority": page[-1].priority, "last_id": page[-1].id}
        page = connection.execute(lane.next_page, values).all()


def waits_for(name: str) -> bool:
    """Return True if jobs wait for a worker with this name, whether there ever was one or not: leave to run uploaded
    code, several nodes, or the schema of its spec."""
    return name == RUNS_CODE or name.startswith(f"{NODES}:")


def _fits_now(job: Row[Any], offer: Offer) -> bool:
    on_cpu = job.device_type == "cpu" or offer.total_gpus == 0
    if (on_cpu or job.exclusive_host) and not offer.idle:
        return False
    return on_cpu or bool(job.devices <= offer.free_gpus)
