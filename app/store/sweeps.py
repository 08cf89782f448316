"""Jobs of sweeps. A point that was resumed has several jobs: the latest is the one that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, Text, cast, func, select

from app.store import tables

_job = tables.job.c


def latest_jobs(sweep_ids: Sequence[int]) -> Select[tuple[int]]:
    """A query for the ids of the latest job of each point of these sweeps, for `job.id.in_(…)`.

    Jobs of an older Flopwatch whose point could not be told are told apart by their specs.
    """
    point = func.coalesce(cast(_job.point, Text), cast(_job.spec, Text))
    return select(func.max(_job.id)).where(_job.sweep_id.in_(sweep_ids)).group_by(_job.sweep_id, point)


def counts(connection: Connection, sweep_ids: Sequence[int]) -> dict[int, dict[str, int]]:
    """How many points of each sweep are in each state: the state of their latest job."""
    query = select(_job.sweep_id, _job.state, func.count()).where(_job.id.in_(latest_jobs(sweep_ids)))
    found: dict[int, dict[str, int]] = {}
    for sweep_id, state, number in connection.execute(query.group_by(_job.sweep_id, _job.state)):
        found.setdefault(sweep_id, {})[state] = number
    return found


def without_result(connection: Connection, sweep_id: int) -> list[dict[str, Any]]:
    """The latest job of each point that ended without a result, as rows of the table `job`, in submission's order."""
    query = select(tables.job).where(_job.id.in_(latest_jobs([sweep_id])), _job.state.in_(("failed", "cancelled")))
    return [dict(row) for row in connection.execute(query.order_by(_job.id)).mappings()]
