"""Reads how much device time each user had."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from app.store import tables
from app.store.queue import sharing
from app.store.queue.claims import QUEUED
from app.store.queue.sharing import NOBODY

LEAST_S = 1.0
"""Recent device seconds of users who are listed, though they have no job now."""

_job, _use = tables.job.c, tables.device_use.c


def usage(connection: Connection, since: datetime) -> list[dict[str, Any]]:
    """Return device hours and attempts by user, kind and device, the greatest first.

    An attempt counts in the hour in which it ended, and whole hours are kept: the first one is that of `since`.
    """
    keys = (_use.submitted_by, _use.kind, _use.device)
    device_s = func.sum(_use.device_s)
    query = select(*keys, func.sum(_use.attempts), device_s).where(_use.hour >= sharing.hour_of(since)).group_by(*keys)
    return [
        {
            "user": user or None,
            "kind": kind,
            "device": device,
            "attempts": int(attempts),
            "device_hours": seconds / 3600,
        }
        for user, kind, device, attempts, seconds in connection.execute(query.order_by(device_s.desc(), *keys))
    ]


def standing(connection: Connection) -> list[dict[str, Any]]:
    """Return who competes now, the next one first: device hours that count in the fair order (null if all are one
    user), devices that running jobs hold, and queued jobs."""
    counts = select(_job.submitted_by, func.count()).where(QUEUED).group_by(_job.submitted_by)
    counts = counts.with_hint(tables.job, "INDEXED BY ix_job_claimable_by_user", "sqlite")  # else it reads every row
    queued = {user or NOBODY: number for user, number in connection.execute(counts)}
    of_users = sharing.named_shares(connection)
    recent = {user for user, used_s in of_users.used_s.items() if used_s >= LEAST_S}
    rows = [
        {
            "user": user or None,
            "recent_device_hours": of_users.of(user) / 3600 if of_users.are_several else None,
            "running_devices": of_users.devices.get(user, 0),
            "queued_jobs": queued.get(user, 0),
        }
        for user in {*queued, *of_users.devices, *(recent if of_users.are_several else ())}
    ]
    return sorted(rows, key=lambda row: (row["recent_device_hours"] or 0.0, row["user"] or ""))
