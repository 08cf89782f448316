"""Which processes run."""

from collections.abc import Iterable
from pathlib import Path

PF_EXITING = 4
"""A flag in /proc/PID/stat. A process lets go of its locks a moment before it is a zombie."""


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that has ended may wait for its parent to take notice."""
    try:
        state, *_, flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:7]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and not int(flags) & PF_EXITING


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that run."""
    return [pid for pid in pids if is_alive(pid)]
