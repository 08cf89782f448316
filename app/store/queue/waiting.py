"""Finds the reason why a queued job cannot start.

It is paused, no connected worker has what it needs, or none that has it is free: it runs other jobs, or another
Flopwatch on its host holds the devices. A job that waits behind others while a worker is free has no reason.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, select

from app.specs._base import NODES
from app.specs._code import ALLOW_IT, RUNS_CODE
from app.specs._schema import is_name
from app.store import tables
from app.store.queue.hosts import Host, Needs, hosts
from app.store.queue.pausing import PausedKinds, pause_reason, paused_kinds
from app.store.queue.registration import ALIVE
from app.store.queue.sharing import NOBODY, Shares, number_of_devices, policy_of, shares

CLAIMING = ("active", "unfit")
"""States of workers that claim jobs, or will when they are fit again."""
MAX_NAMED = 3
"""Most running jobs that a reason names."""
START_ONE = "start one with `flopwatch worker`"
START_ON_GPUS = (
    "start a worker on a GPU host, or leave out what asks for one: "
    "device=cuda, backend=nccl, cuda_graph, fused or optimizer=triton_adamw"
)


def waiting_reasons(connection: Connection, jobs: Iterable[Mapping[Any, Any]]) -> dict[int, str]:
    """Return the reasons, by job id, of those rows of the table `job` that are queued and cannot start.

    It reads the workers and the paused kinds once for all rows, and only if one of the jobs is queued.
    """
    queued = [job for job in jobs if job["state"] == "queued"]
    reasons = {int(job["id"]): str(job["waiting_reason"]) for job in queued if job["waiting_reason"]}
    if len(reasons) == len(queued):
        return reasons
    reason_for = _reasons(connection)
    of_users = shares(connection) if policy_of(connection).most_devices is not None else None
    for job in queued:
        if job["waiting_reason"]:
            continue
        if reason := _full_reason(job, of_users) or reason_for(Needs.of(job)):
            reasons[int(job["id"])] = reason
    return reasons


def stuck(connection: Connection, jobs: Iterable[Mapping[Any, Any]]) -> frozenset[int]:
    """Return the ids of those rows of the table `job` that nobody can start now: their kind is paused, or no connected
    worker could run them."""
    connected, paused = hosts(connection, ALIVE), paused_kinds(connection)
    return frozenset(int(job["id"]) for job in jobs if _stuck_reason(Needs.of(job), connected, paused) is not None)


def _stuck_reason(job: Needs, connected: Sequence[Host], paused: PausedKinds) -> str | None:
    return pause_reason(job.kind, paused) or missing_for(job, connected)


def _full_reason(job: Mapping[Any, Any], of_users: Shares | None) -> str | None:
    """Say that the job's user holds as many devices as one user may; None if it may hold the job's, too."""
    if of_users is None or not of_users.is_full(job["submitted_by"], job):
        return None
    held, most = of_users.devices.get(job["submitted_by"] or NOBODY, 0), of_users.most_devices
    whose = f"{job['submitted_by']}'s running jobs" if job["submitted_by"] else "running jobs of unknown users"
    needed = number_of_devices(job)
    devices = "device" if held == 1 else "devices"
    return f"{whose} hold {held} {devices}, of at most {most}, and it needs {needed} (FLOPWATCH_MAX_RUNNING_DEVICES)"


def _reasons(connection: Connection) -> Callable[[Needs], str | None]:
    connected, paused = hosts(connection, ALIVE), paused_kinds(connection)
    running, ids = _running(connection) if connected else ({}, {})

    @cache  # most jobs of a page need the same
    def reason_for(job: Needs) -> str | None:
        return _stuck_reason(job, connected, paused) or occupied_for(job, connected, running, ids)

    return reason_for


def _running(connection: Connection) -> tuple[dict[str, list[Needs]], dict[str, list[int]]]:
    """Return the needs of the running jobs, and their ids, by the name of their worker's host."""
    job, worker = tables.job.c, tables.worker.c
    query = (
        select(job.id, job.kind, job.device_type, job.devices, job.requirements, job.exclusive_host, worker.hostname)
        .join_from(tables.job, tables.worker, job.worker_id == worker.id)
        .where(job.state == "running")
    )
    running, ids = defaultdict(list), defaultdict(list)
    for row in connection.execute(query.order_by(job.id)):
        running[row.hostname].append(Needs.of(row._mapping))
        ids[row.hostname].append(int(row.id))
    return running, ids


def missing_for(job: Needs, connected: Sequence[Host]) -> str | None:
    """Say in words what the job needs that none of these workers has; None when one of them could run it."""
    start_one = ALLOW_IT if RUNS_CODE in job.requirements else START_ONE
    if not connected:
        return f"no worker is connected: if none is starting, {start_one}"
    candidates = [host for host in connected if host.state in CLAIMING]
    if not candidates:
        return f"every connected worker is stopping and takes no new jobs: {start_one}"
    candidates = [host for host in candidates if job.kind in host.kinds]
    if not candidates:
        return f"no connected worker runs the kind {_quoted(job.kind)}"
    most = max(host.gpus for host in candidates)
    candidates = [host for host in candidates if host.has_devices_for(job)]
    if not candidates:
        needed = "a GPU" if job.devices == 1 else f"{job.devices} GPUs"
        return f"it needs {needed}, and no connected worker has " + (
            f"more than {most}" if most else f"any: {START_ON_GPUS}"
        )
    if missing := _missing_names(job.requirements, candidates):
        return missing
    able = [host for host in candidates if job.requirements <= host.capabilities]
    if all(host.state == "unfit" for host in able):
        reasons = "; ".join(sorted({f"{host.hostname}: {host.unfit}" for host in able})[:MAX_NAMED])
        return f"every worker that could run it is unfit now ({reasons})"
    return None


def occupied_for(
    job: Needs,
    connected: Sequence[Host],
    running: Mapping[str, Sequence[Needs]],
    ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> str | None:
    """Say in words who holds the devices of every one of these workers that could run the job; None when one is free.

    running, ids: the needs of our running jobs, and their ids, by the name of their host.
    """
    able = [host for host in connected if host.state == "active" and host.could_run(job)]
    if not all(_is_occupied(host, job, running.get(host.hostname, ())) for host in able):
        return None
    # What another worker of ours on the same host holds is no other Flopwatch's.
    elsewhere = [host for host in able if not running.get(host.hostname)]
    if not elsewhere:
        runs = sorted({job_id for host in able for job_id in ids.get(host.hostname, ())})
        named = f": job{'s' * (len(runs) > 1)} {', '.join(map(str, runs))} run{'s' * (len(runs) == 1)}"
        return "no worker that could run it is free now" + (named if 0 < len(runs) <= MAX_NAMED else "")
    devices = "CPU" if all(host.needed_alone(job) for host in elsewhere) else "GPUs"
    names = ", ".join(sorted({_quoted(host.hostname) for host in elsewhere}))
    others = "; the other workers that could run it run other jobs" if len(elsewhere) < len(able) else ""
    return f"another Flopwatch holds the {devices} of {names}{others}"


def _is_occupied(host: Host, job: Needs, ours: Sequence[Needs]) -> bool:
    if host.is_cluster:
        return False
    if host.needed_alone(job):
        return bool(ours) or "host" in host.held_by_others
    if any(host.needed_alone(one) for one in ours):
        return True
    return sum(one.devices for one in ours) + host.held_gpus + job.devices > host.gpus


def _missing_names(requirements: frozenset[str], candidates: Sequence[Host]) -> str | None:
    if any(requirements <= host.capabilities for host in candidates):
        return None
    somewhere = frozenset[str]().union(*(host.capabilities for host in candidates))
    if any(map(is_name, requirements - somewhere)):
        return "no connected worker with such devices is as new as the server: update them, and start them again"
    if RUNS_CODE in requirements - somewhere:
        return f"no connected worker with such devices runs uploaded code: {ALLOW_IT}"
    missing = sorted(requirements - somewhere)
    names = ", ".join(_in_words(name) for name in missing or sorted(requirements))
    return f"no connected worker with such devices has {names}" + ("" if missing else " together")


def _in_words(requirement: str) -> str:
    if requirement == RUNS_CODE:
        return "leave to run uploaded code"
    family, _, name = requirement.partition(":")
    if family == NODES:
        return f"{name} nodes, as `flopwatch worker --executor slurm` has, up to its setting max_nodes"
    return f"the {family} {_quoted(name)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
