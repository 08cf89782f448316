"""Reads the host's memory from /proc/meminfo. Imports no torch."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def host_memory(name: str, meminfo: Path = MEMINFO) -> int | None:
    """Return an amount of the host's memory in bytes; None if it is unknown.

    Args:
        name: "MemTotal", or "MemAvailable": what a process could take without pushing others out.
        meminfo: The kernel's file.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
