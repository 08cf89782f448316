"""Reads the host's memory from /proc/meminfo, and gives memory back. Imports no torch."""

import ctypes
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")
CGROUP = Path("/sys/fs/cgroup")
"""The folder of this process's control group, inside a container."""
LEAST_RESERVE = 512 * 2**20
RESERVED_SHARE = 0.05
"""What jobs leave to others: this share of the host's memory, and at least LEAST_RESERVE bytes."""
MEMINFO = Path("/proc/meminfo")


def kib_in(file: Path, name: str) -> int | None:
    """Return a field of /proc/meminfo, or of a process's `status`, in KiB; None if it is unknown."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def host_memory(name: str, meminfo: Path = MEMINFO) -> int | None:
    """Return an amount of the host's memory in bytes; None if it is unknown. `name`: "MemTotal", or "MemAvailable":
    what a process could take without pushing others out."""
    kib = kib_in(meminfo, name)
    return None if kib is None else 1024 * kib


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Return how many bytes this process could take: what the host has available, and its container's limit leaves;
    None if it is unknown."""
    free = host_memory("MemAvailable", meminfo)
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["anon"]
    except (OSError, KeyError):
        return free
    if most == "max":
        return free
    left = max(0, int(most) - int(used))
    return left if free is None else min(free, left)


def bound_memory(processes: int = 1) -> None:
    """Let this process, or each of so many that it starts, take the memory that is free now, less a reserve for all
    others: a case that needs more is out of memory, as on a GPU, and the host does not run out of it."""
    free = free_memory()
    if free is None:
        return
    reserve = max(LEAST_RESERVE, int(RESERVED_SHARE * (host_memory("MemTotal") or 0)))
    taken = 1024 * (kib_in(STATUS, "VmData") or 0)
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = taken + max(0, free - reserve) // processes
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def trim_free_memory() -> None:
    """Give the memory that the C library keeps for later allocations back to the system, if it can: glibc does.

    Otherwise a unit allocates from what the unit before it freed, and that does not count as growth of the process
    (`HostMemory`). It takes milliseconds, and the pages must be mapped again when they are used.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
