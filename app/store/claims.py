"""Which queued job a worker runs next.

The order is priority, then submission. The first job that the worker's host could run if it were empty decides: when it
does not fit now, nothing is claimed, so that narrow jobs cannot keep a wide one waiting for ever. Passed over are jobs
of another kind, jobs for devices that the host does not have, and jobs that need a name (a model, an attention
implementation) which another live worker has and this one lacks; when nobody has it, the runner here says
`unsupported`.
"""

from __future__ import annotations

from dataclasses import dataclass
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

from app.store import tables
from app.store.records import Offer

FIRST, NEXT = 4, 200
"""Rows that are looked at: nearly always the first decides."""

_job = tables.job.c
# A literal: with a bound value SQLite could not tell that the partial index ix_job_claimable holds the answer.
QUEUED: ColumnElement[bool] = _job.state == literal_column("'queued'")
_ORDER = (_job.priority.desc(), _job.id)
_KINDS: BindParameter[Any] = bindparam("kinds", expanding=True)


def _candidates(*conditions: ColumnElement[bool]) -> Select[Any]:
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
        # Else it takes ix_job_state_id and sorts the whole queue for every claim: 30 ms with 100 000 queued.
        .with_hint(tables.job, "INDEXED BY ix_job_claimable", "sqlite")
        .where(QUEUED, _job.kind.in_(_KINDS), *conditions)
        .order_by(*_ORDER)
        .limit(bindparam("limit"))
    )


_ON_CPU_HOST = _job.device_type != "cuda"
_ON_GPU_HOST = or_(_job.device_type == "cpu", _job.devices <= bindparam("total_gpus"))
_BEYOND = or_(
    _job.priority < bindparam("last_priority"),
    and_(_job.priority == bindparam("last_priority"), _job.id > bindparam("last_id")),
)
FIRST_PAGE = {False: _candidates(_ON_CPU_HOST), True: _candidates(_ON_GPU_HOST)}
NEXT_PAGE = {False: _candidates(_ON_CPU_HOST, _BEYOND), True: _candidates(_ON_GPU_HOST, _BEYOND)}

_OTHER_WORKERS = select(tables.worker.c.kinds, tables.worker.c.capabilities, tables.worker.c.devices).where(
    tables.worker.c.state == "active", tables.worker.c.id != bindparam("worker_id")
)


@dataclass(frozen=True)
class _Other:
    kinds: frozenset[str]
    capabilities: frozenset[str]
    gpus: int

    def could_run(self, job: Row[Any]) -> bool:
        if job.device_type == "cuda" and job.devices > self.gpus:
            return False
        return job.kind in self.kinds and self.capabilities.issuperset(job.requirements)


def next_job(connection: Connection, worker_id: str, offer: Offer) -> int | None:
    """The id of the job that the worker must run next, or None when there is none that it can start now."""
    on_gpus = offer.total_gpus > 0
    values: dict[str, Any] = {"kinds": sorted(offer.kinds), "limit": FIRST}
    if on_gpus:
        values["total_gpus"] = offer.total_gpus
    others: list[_Other] | None = None
    page = connection.execute(FIRST_PAGE[on_gpus], values).all()
    while True:
        for job in page:
            if not offer.capabilities.issuperset(job.requirements):
                others = _others(connection, worker_id) if others is None else others
                if any(other.could_run(job) for other in others):
                    continue
            return int(job.id) if _fits_now(job, offer) else None
        if len(page) < values["limit"]:
            return None
        values |= {"limit": NEXT, "last_priority": page[-1].priority, "last_id": page[-1].id}
        page = connection.execute(NEXT_PAGE[on_gpus], values).all()


def _fits_now(job: Row[Any], offer: Offer) -> bool:
    on_cpu = job.device_type == "cpu" or offer.total_gpus == 0
    if (on_cpu or job.exclusive_host) and not offer.idle:
        return False
    return on_cpu or bool(job.devices <= offer.free_gpus)


def _others(connection: Connection, worker_id: str) -> list[_Other]:
    rows = connection.execute(_OTHER_WORKERS, {"worker_id": worker_id})
    return [
        _Other(
            frozenset(row.kinds),
            frozenset(row.capabilities),
            sum(isinstance(device, dict) and device.get("type") == "cuda" for device in row.devices),
        )
        for row in rows
    ]
