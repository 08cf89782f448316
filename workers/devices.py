"""What this host has, and which devices a job gets.

Devices are locked by flock on a file each, so that two agents on one host never measure on one GPU at a time, and a
CPU measurement runs alone. A job's keeper inherits the locks: a device is free only when nothing of the job is left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML names it."""

    uuid: str
    name: str
    memory_mib: int


@dataclass(frozen=True)
class Host:
    """What the host offers."""

    gpus: tuple[Gpu, ...]
    cpu_count: int
    memory_mib: int

    def as_devices(self) -> list[dict[str, Any]]:
        """For the worker's row: one object per device."""
        cpu = {"type": "cpu", "count": self.cpu_count, "memory_mib": self.memory_mib}
        return [cpu, *({"type": "cuda", **asdict(gpu)} for gpu in self.gpus)]


def discover() -> Host:
    """Ask NVML; a host without NVIDIA's driver has no GPUs. CUDA_VISIBLE_DEVICES is obeyed."""
    memory_mib = psutil.virtual_memory().total >> 20
    return Host(gpus=_visible(_gpus()), cpu_count=len(os.sched_getaffinity(0)), memory_mib=memory_mib)


def _gpus() -> list[Gpu]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.info("no GPUs: %s", error)
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
            gpus.append(Gpu(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), memory))
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by a UUID's beginning; CUDA stops at the first unknown."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit() and int(name) < len(gpus):
            chosen.append(gpus[int(name)])
        elif name.startswith("GPU-") and (matching := [gpu for gpu in gpus if gpu.uuid.startswith(name)]):
            chosen.append(matching[0])
        else:
            break
    return tuple(chosen)


@dataclass
class Lease:
    """Locked devices of one job; `descriptors` go to its keeper."""

    gpus: tuple[Gpu, ...] = ()
    alone: bool = False
    descriptors: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Close our copies of the locks; a keeper may hold its own still."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class DeviceLocks:
    """The host's locks. Never waits: what is locked is not free now."""

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        self._host = host
        self._folder = folder or Path(tempfile.gettempdir()) / f"flopwatch-locks-{os.getuid()}"

    def take_free(self) -> Lease:
        """Lock all that is free: every free GPU, and the host alone if nothing else holds it, else shared.

        A lease without descriptors means that somebody has the host alone.
        """
        lease = Lease()
        # Every time: hosts clean their temporary folders.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        alone = self._lock("host", fcntl.LOCK_EX)
        shared = alone if alone is not None else self._lock("host", fcntl.LOCK_SH)
        if shared is None:
            return lease
        lease.descriptors.append(shared)
        lease.alone = alone is not None
        free = []
        for gpu in self._host.gpus:
            descriptor = self._lock(gpu.uuid, fcntl.LOCK_EX)
            if descriptor is not None:
                free.append(gpu)
                lease.descriptors.append(descriptor)
        lease.gpus = tuple(free)
        return lease

    def keep_only(self, lease: Lease, *, gpus: int, alone: bool) -> Lease:
        """Give back all but the first `gpus` GPUs, and share the host unless `alone`."""
        host, *locks = lease.descriptors
        for descriptor in locks[gpus:]:
            os.close(descriptor)
        if not alone:
            fcntl.flock(host, fcntl.LOCK_SH)
        return Lease(lease.gpus[:gpus], alone, [host, *locks[:gpus]])

    def _lock(self, name: str, operation: int) -> int | None:
        descriptor = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor
