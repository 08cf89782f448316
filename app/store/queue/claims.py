"""Chooses the queued job that a worker runs next.

The order is priority, then the user who used the least device time lately (sharing.py), then submission. The first job
that the worker's host could run if it were empty decides: when it does not fit now, the worker claims nothing, so that
narrow jobs cannot keep a wide one waiting for ever. The worker passes over jobs of another kind, jobs for devices that
the host does not have, jobs of users who hold as many devices as they may, and jobs that need a name (a model, an
attention implementation) which another worker has and this one lacks. That worker may have stopped: the job then waits
for one like it, and says so (waiting.py). The runner refuses a name that no worker ever had, as `unsupported`. A job
with uploaded code waits for a worker that may run it, whether there ever was one or not; and a job of a newer server
waits for a worker that can read its spec.

A worker claims jobs that need no device first, and runs them beside jobs on its GPUs. A job that has the host for
itself, as one on the CPU has, waits for them, and they for it, in the order of the queue. No worker claims a job of a
paused kind, and such a job delays no other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    CompoundSelect,
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
from app.store.queue.hosts import Host, Needs, known_hosts, runs_alone
from app.store.queue.pausing import paused_kinds, unpaused
from app.store.queue.sharing import Shares, shares
from app.store.records import Offer

FIRST, NEXT = 4, 200
"""Number of rows of the first page and of each further one. Nearly always the first row decides."""

_job = tables.job.c
# This is a literal: with a bound value SQLite could not tell that the partial index ix_job_claimable holds the answer.
QUEUED: ColumnElement[bool] = _job.state == literal_column("'queued'")
UNCLAIMED = and_(QUEUED, _job.waiting_reason.is_(None))
"""The condition for jobs that a worker may claim: the other queued ones wait in a cluster's queue."""
_ORDER = (_job.priority.desc(), _job.id)
CONSIDERED = tuple(_job[name] for name in ("id", "priority", "submitted_by", *Needs.__annotations__))
_KINDS: BindParameter[Any] = bindparam("kinds", expanding=True)


def _candidates(index: str, *conditions: ColumnElement[bool]) -> Select[Any]:
    return (
        select(*CONSIDERED)
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


_BY_USER = "ix_job_claimable_by_user"


def _first_of_each(condition: ColumnElement[bool]) -> CompoundSelect[Any]:
    """Build a query for the first job of each user, and of nobody. It takes each name from the index, and looks up the
    next one (a loose index scan), so the number of jobs does not matter."""
    one, head = tables.job.alias("one"), tables.job.alias("head")
    name = select(one.c.submitted_by).with_hint(one, f"INDEXED BY {_BY_USER}", "sqlite")
    name = name.where(one.c.state == literal_column("'queued'")).order_by(one.c.submitted_by).limit(1)
    users = select(name.where(one.c.submitted_by.is_not(None)).scalar_subquery().label("name")).cte(recursive=True)
    following = name.where(one.c.submitted_by > users.c.name).correlate(users).scalar_subquery()
    users = users.union_all(select(following).where(users.c.name.is_not(None)))

    def first(whose: ColumnElement[bool]) -> ColumnElement[int]:
        its = _candidates(_BY_USER, condition, whose).correlate(users)
        return its.with_only_columns(_job.id).limit(1).scalar_subquery()

    columns = select(*(head.c[column.name] for column in CONSIDERED))
    of_users = columns.select_from(users.join(head, head.c.id == first(_job.submitted_by == users.c.name)))
    return of_users.union_all(columns.where(head.c.id == first(_job.submitted_by.is_(None))))


@dataclass(frozen=True)
class Lane:
    """Queued jobs that one host could run, in pages: nearly always the first page decides."""

    first_page: Select[Any]
    next_page: Select[Any]
    first_of_each: CompoundSelect[Any]
    next_of_user: Select[Any]
    next_of_nobody: Select[Any]


def _lane(index: str, condition: ColumnElement[bool]) -> Lane:
    of_user, of_nobody = _job.submitted_by == bindparam("user"), _job.submitted_by.is_(None)
    return Lane(
        first_page=_candidates(index, condition),
        next_page=_candidates(index, condition, _BEYOND),
        first_of_each=_first_of_each(condition),
        next_of_user=_candidates(_BY_USER, condition, of_user, _BEYOND),
        next_of_nobody=_candidates(_BY_USER, condition, of_nobody, _BEYOND),
    )


DEVICELESS = _lane("ix_job_deviceless", NO_DEVICE)
ON_CPU_HOST = _lane("ix_job_claimable", _ON_CPU_HOST)
ON_GPU_HOST = _lane("ix_job_claimable", _ON_GPU_HOST)


def next_job(connection: Connection, worker_id: str, offer: Offer) -> int | None:
    """Return the id of the job that the worker must run next; None if it can start none now."""
    names = offer.capabilities | names_up_to(offer.schema_number)
    offer = replace(offer, kinds=unpaused(offer.kinds, paused_kinds(connection)), capabilities=names)
    if not offer.kinds:
        return None
    of_users = shares(connection)
    job = _first_runnable(connection, DEVICELESS, worker_id, offer, of_users) if offer.deviceless else None
    lane = ON_GPU_HOST if offer.total_gpus else ON_CPU_HOST
    other = _first_runnable(connection, lane, worker_id, offer, of_users)
    if job is None or (
        other is not None
        and (runs_alone(other, offer.total_gpus) or runs_alone(job, offer.total_gpus))
        and _place(other, of_users) < _place(job, of_users)
    ):
        job = other
    return int(job.id) if job is not None and _fits_now(job, offer) else None


def _first_runnable(
    connection: Connection, lane: Lane, worker_id: str, offer: Offer, of_users: Shares | None
) -> Row[Any] | None:
    """Return the first job of the lane that this worker could run if its host were idle."""
    values: dict[str, Any] = {"kinds": sorted(offer.kinds), "total_gpus": offer.total_gpus}
    others: list[Host] | None = None
    for job in _in_order(connection, lane, values, of_users):
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
    return None


def _in_order(
    connection: Connection, lane: Lane, values: dict[str, Any], of_users: Shares | None
) -> Iterator[Row[Any]]:
    if of_users is None or lane is DEVICELESS:
        page = connection.execute(lane.first_page, {**values, "limit": FIRST}).all()
        if of_users is None:
            yield from page
            if len(page) == FIRST:
                yield from _after(connection, lane.next_page, page[-1], values)
        if of_users is None or not page:  # there is nearly never a job without devices, and its index says so soonest
            return

    def jobs_of_user(job: Row[Any]) -> Iterator[Row[Any]]:
        following = lane.next_of_nobody if job.submitted_by is None else lane.next_of_user
        for one in chain([job], _after(connection, following, job, {**values, "user": job.submitted_by})):
            if of_users.is_full(job.submitted_by, one._mapping):
                return  # the user's later jobs wait, too: else a wide one would wait for ever
            yield one

    yield from merge(
        *(jobs_of_user(job) for job in connection.execute(lane.first_of_each, values).all()),
        key=lambda job: _place(job, of_users),
    )


def _place(job: Row[Any], of_users: Shares | None) -> tuple[Any, ...]:
    return -job.priority, (0.0, 0) if of_users is None else of_users.rank(job.submitted_by), job.id


def _after(connection: Connection, query: Select[Any], last: Row[Any], values: dict[str, Any]) -> Iterator[Row[Any]]:
    while True:
        beyond = {"limit": NEXT, "last_priority": last.priority, "last_id": last.id}
        page = connection.execute(query, {**values, **beyond}).all()
        yield from page
        if len(page) < NEXT:
            return
        last = page[-1]


def waits_for(name: str) -> bool:
    """Return True if jobs wait for a worker with this name, whether there ever was one or not: leave to run uploaded
    code, several nodes, or the schema of its spec."""
    return name == RUNS_CODE or name.startswith(f"{NODES}:")


def _fits_now(job: Row[Any], offer: Offer) -> bool:
    if runs_alone(job, offer.total_gpus) and not offer.idle:
        return False
    return job.device_type in ("cpu", "none") or not offer.total_gpus or bool(job.devices <= offer.free_gpus)
