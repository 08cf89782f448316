"""Tells which jobs the workers' hosts could run if they were idle: for claiming, and for saying why a job waits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from app.specs._schema import names_up_to
from app.states import WorkerState
from app.store import tables


@dataclass(frozen=True)
class Needs:
    """A job's needs of a host: columns of the table `job`."""

    kind: str
    device_type: str
    devices: int
    requirements: frozenset[str]
    exclusive_host: bool = False

    @classmethod
    def of(cls, job: Mapping[Any, Any]) -> Needs:
        """Return the needs of the job in this row of the table `job`."""
        return cls(
            job["kind"], job["device_type"], job["devices"], frozenset(job["requirements"]), job["exclusive_host"]
        )


@dataclass(frozen=True)
class Host:
    """A host's kinds, names and devices. `gpus` is the number of GPUs that one job can use."""

    state: str | None
    """State of its worker; None if the worker may be gone."""
    kinds: frozenset[str]
    capabilities: frozenset[str]
    gpus: int
    hostname: str = ""
    held_by_others: frozenset[str] = frozenset()
    """Devices that others hold, as this worker reported: UUIDs of GPUs, and "host" if no job could run alone."""
    held_gpus: int = 0
    """How many of `gpus` are among them."""
    is_cluster: bool = False
    """True if its jobs get nodes of a cluster: then `gpus` are those of one node."""
    unfit: str = ""
    """Why its worker claims nothing now."""

    def has_devices_for(self, job: Needs) -> bool:
        """Return True if the host has the devices. Every host has a CPU; `auto` needs the requested number of GPUs if
        the host has any."""
        if job.device_type in ("cpu", "none"):
            return True
        if job.device_type == "auto" and self.gpus == 0:
            return True
        return job.devices <= self.gpus

    def needed_alone(self, job: Needs) -> bool:
        """Return True if the job would run alone on this host."""
        return runs_alone(job, self.gpus)

    def could_run(self, job: Needs) -> bool:
        """Return True if the host has the job's kind, devices and names."""
        return job.kind in self.kinds and self.has_devices_for(job) and self.capabilities.issuperset(job.requirements)


def runs_alone(job: Any, gpus: int) -> bool:
    """Return True if a job, `Needs` or a row that has them, would run alone on a host with so many GPUs."""
    on_cpu = job.device_type == "cpu" or (job.device_type != "none" and gpus == 0)
    return bool(job.exclusive_host or on_cpu)


def hosts(connection: Connection, states: Collection[WorkerState]) -> list[Host]:
    """Return the hosts of the workers in one of these states, one for each worker."""
    query = select(tables.worker).where(tables.worker.c.state.in_(states))
    return [_host(row) for row in connection.execute(query).mappings()]


def _host(row: RowMapping) -> Host:
    uuids = _uuids(row["devices"])
    readings = row["readings"] or {}
    held = frozenset[str](readings.get("held_by_others") or ())
    gpus = _gpus(row["devices"])
    return Host(
        state=row["state"],
        kinds=frozenset(row["kinds"]),
        capabilities=frozenset(row["capabilities"]) | names_up_to(row["schema_number"]),
        unfit=str((row["unfit"] or {}).get("reason", "")),
        gpus=gpus,
        hostname=row["hostname"],
        held_by_others=held,
        held_gpus=gpus - gpus_of_one_job([uuid for uuid in uuids if uuid not in held]) if uuids else 0,
        is_cluster=bool(_clusters(row["devices"])),
    )


def known_hosts(connection: Connection, *, other_than: str | None = None) -> list[Host]:
    """Return each different host that a worker ever registered, until retention forgets it (see pruning.py).

    other_than: leave out the host that this worker registered.
    """
    query = select(tables.known_host)
    worker = tables.worker.c
    own = select(worker.kinds, worker.capabilities, worker.devices).where(worker.id == other_than)
    if other_than is not None and (row := connection.execute(own).one_or_none()) is not None:
        query = query.where(tables.known_host.c.key != known_host(*row)["key"])
    return [
        Host(state=None, kinds=frozenset(row.kinds), capabilities=frozenset(row.capabilities), gpus=row.gpus)
        for row in connection.execute(query)
    ]


def known_host(kinds: Iterable[str], capabilities: Iterable[str], devices: Iterable[Any]) -> dict[str, Any]:
    """Make the row of the table `known_host` for a host with these kinds, names and devices, without its time."""
    has = {"kinds": sorted(kinds), "capabilities": sorted(capabilities), "gpus": _gpus(devices)}
    return {"key": hashlib.sha256(json.dumps(has, sort_keys=True).encode()).hexdigest(), **has}


def gpus_of_one_job(uuids: Collection[str]) -> int:
    """Return how many of the GPUs with these UUIDs one job can use: a CUDA process sees one MIG instance at most."""
    whole = sum(not uuid.startswith("MIG-") for uuid in uuids)
    return max(whole, min(len(uuids), 1))


def _gpus(devices: Iterable[Any]) -> int:
    return max([gpus_of_one_job(_uuids(devices)), *(int(one.get("gpus_per_node", 0)) for one in _clusters(devices))])


def _clusters(devices: Iterable[Any]) -> list[dict[str, Any]]:
    return [device for device in devices if isinstance(device, dict) and device.get("type") == "slurm"]


def _uuids(devices: Iterable[Any]) -> list[str]:
    return [str(device.get("uuid")) for device in devices if isinstance(device, dict) and device.get("type") == "cuda"]
