"""When a process started, which tells it from a later process with the same pid. Standard library only."""

from pathlib import Path

PROC = Path("/proc")
_DEAD = ("Z", "X")


def start_of(pid: int) -> str | None:
    """Return the time at which the process started, in ticks since the boot; None if it is dead.

    Raises:
        OSError: /proc cannot be read, such as when no file descriptor is left.
    """
    try:
        state, *fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in _DEAD else fields[18]
