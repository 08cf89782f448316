"""Finds the reason why a queued job cannot start.

A job has a reason only if waiting longer does not help: no connected worker has what it needs, or its kind is paused. A
job that only waits for its turn, or for devices that other jobs hold, has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from app.specs._code import ALLOW_IT, RUNS_CODE
from app.store import tables
from app.store.queue.claims import QUEUED
from app.store.queue.hosts import Host, Needs, comparable, hosts
from app.store.queue.pausing import pause_reason, paused_kinds

START_ONE = "start one with `flopwatch worker`"


def waiting_reasons(connection: Connection, jobs: Iterable[Mapping[Any, Any]]) -> dict[int, str]:
    """Return the reasons, by job id, of those rows of the table `job` that are queued and cannot start.

    It reads the workers and the paused kinds once for all rows, and only if one of the jobs is queued.
    """
    queued = [job for job in jobs if job["state"] == "queued"]
    if not queued:
        return {}
    connected, paused = hosts(connection, ("active", "draining")), paused_kinds(connection)
    reasons = {}
    for job in queued:
        if reason := pause_reason(job["kind"], paused) or missing_for(Needs.of(job), connected):
            reasons[int(job["id"])] = reason
    return reasons


def waiting_groups(connection: Connection) -> list[dict[str, Any]]:
    """Return the queued jobs grouped by their needs, the largest group first: kind, devices, names, number of jobs, the
    id of the job submitted first, and the reason as above.
    """
    job = tables.job.c
    needs = (job.kind, job.device_type, job.devices, comparable(job.requirements))
    query = select(*needs, func.count(), func.min(job.id)).where(QUEUED).group_by(*needs)
    connected, paused = hosts(connection, ("active", "draining")), paused_kinds(connection)
    groups = []
    for kind, device_type, devices, requirements, number, first in connection.execute(query):
        needed = Needs(kind, device_type, devices, frozenset(requirements))
        groups.append(
            {
                "kind": kind,
                "device_type": device_type,
                "devices": devices,
                "requirements": sorted(needed.requirements),
                "jobs": number,
                "first_job": first,
                "waiting": pause_reason(kind, paused) or missing_for(needed, connected),
            }
        )
    return sorted(groups, key=lambda group: (-group["jobs"], group["first_job"]))


def missing_for(job: Needs, connected: Sequence[Host]) -> str | None:
    """Say in words what the job needs that none of these workers has; None when one of them could run it."""
    start_one = ALLOW_IT if RUNS_CODE in job.requirements else START_ONE
    if not connected:
        return f"no worker is connected: {start_one}"
    candidates = [host for host in connected if host.state == "active"]
    if not candidates:
        return f"every connected worker is stopping and takes no new jobs: {start_one}"
    candidates = [host for host in candidates if job.kind in host.kinds]
    if not candidates:
        return f"no connected worker runs the kind {_quoted(job.kind)}"
    most = max(host.gpus for host in candidates)
    candidates = [host for host in candidates if host.has_devices_for(job)]
    if not candidates:
        needed = "a GPU" if job.devices == 1 else f"{job.devices} GPUs"
        return f"it needs {needed}, and no connected worker has " + (f"more than {most}" if most else "any")
    return _missing_names(job.requirements, candidates)


def _missing_names(requirements: frozenset[str], candidates: Sequence[Host]) -> str | None:
    if any(requirements <= host.capabilities for host in candidates):
        return None
    somewhere = frozenset[str]().union(*(host.capabilities for host in candidates))
    if RUNS_CODE in requirements - somewhere:
        return f"no connected worker with such devices runs uploaded code: {ALLOW_IT}"
    missing = sorted(requirements - somewhere)
    names = ", ".join(_in_words(name) for name in missing or sorted(requirements))
    return f"no connected worker with such devices has {names}" + ("" if missing else " together")


def _in_words(requirement: str) -> str:
    if requirement == RUNS_CODE:
        return "leave to run uploaded code"
    family, _, name = requirement.partition(":")
    return f"the {family} {_quoted(name)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
