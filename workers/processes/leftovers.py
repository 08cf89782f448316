"""Finds and kills the processes that units of a dead agent have left behind.

A keeper ends its unit when the agent dies, and the keeper's parent when the keeper dies. When agent, warm parent and
keeper are killed together, no process is left to do so, and a daemon in a session of its own would run on beside the
job's next attempt. So an agent marks every process below it, and each agent that shares its devices kills processes
with the mark of a dead agent before it uses a device. The mark names the agent: PID namespace, pid and start time, and
a digest of the folder of its device locks. It is a variable in the environment that the processes were started with,
which the kernel shows in /proc/PID/environ. A process that was started without the variable, or that has overwritten
the memory where it stood, is not found.
"""

import hashlib
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PROC = Path("/proc")
VARIABLE = "FLOPWATCHED_BY"


def own_mark(lock_folder: Path) -> str:
    """Return the mark of the agent that this process is."""
    folder = hashlib.sha256(bytes(lock_folder.absolute())).hexdigest()[:12]
    namespace = (PROC / "self" / "ns" / "pid").stat().st_ino
    return f"{namespace}-{os.getpid()}-{start_of(os.getpid())}-{folder}"


def end_leftovers(mark: str) -> list[int]:
    """Kill every process of a dead agent with the same user, PID namespace and lock folder as the agent of `mark`.

    Returns their pids. Call it until there are none, since a process may take seconds to release a
    GPU's memory.
    """
    pids = sorted(map(int, filter(str.isdigit, os.listdir(PROC))))  # noqa: PTH208
    killed = [pid for pid in pids if _kill_if_left(pid, mark)]
    if killed:
        logger.warning("killing processes that a killed worker's job has left behind: %s", ", ".join(map(str, killed)))
    return killed


def _kill_if_left(pid: int, mark: str) -> bool:
    if not _is_left(pid, mark):
        return False
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            # Meanwhile the pid may belong to another process; the descriptor refers to one process only.
            if _is_left(pid, mark):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
    return True


def _is_left(pid: int, mark: str) -> bool:
    try:
        folder = PROC / str(pid)
        if folder.stat().st_uid != os.geteuid():
            return False
        variables = (folder / "environ").read_bytes().split(b"\0")  # a zombie has none
    except OSError:
        return False
    name = f"{VARIABLE}=".encode()
    marks = [variable[len(name) :].decode(errors="replace") for variable in variables if variable.startswith(name)]
    return any(_is_of_dead_agent(other, mark) for other in marks)


def _is_of_dead_agent(other: str, mark: str) -> bool:
    namespace, _pid, _start, folder = mark.split("-")
    match other.split("-"):
        case [other_namespace, pid, start, other_folder] if pid.isdigit() and other_folder == folder:
            try:
                return other_namespace == namespace and start_of(int(pid)) != start
            except OSError:
                return False
    return False


def start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot, which tells it from a later one with its pid; None if it
    is dead. Raises OSError: /proc cannot be read, such as when no file descriptor is left."""
    try:
        state, *fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in ("Z", "X") else fields[18]
