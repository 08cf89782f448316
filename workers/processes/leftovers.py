"""Finds and kills the processes that units of a dead agent have left behind.

A keeper ends its unit when the agent dies, and the keeper's parent when the keeper dies. When agent, warm parent and
keeper are killed together, no process is left to do so, and a daemon in a session of its own would run on beside the
job's next attempt. So an agent marks every process below it, and each agent that shares its devices kills processes
with the mark of a dead agent before it uses a device. The mark names the agent: PID namespace, pid and start time, and
a digest of the folder of its device locks. It stands in two places:

- a variable in the environment that the processes were started with, which the kernel shows in /proc/PID/environ;
- a cgroup (version 2) of that name, where the kernel lets the agent make one below its own. No process can leave it
  that may not write to cgroups, and the kernel kills all of it at once.

Without a cgroup, a process that was started with an environment without the variable, or that has overwritten the
memory where it stood, is not found.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "FLOPWATCHED_BY"
PREFIX = "flopwatch-"
"""Beginning of the cgroups' names."""
_DEAD = ("Z", "X")
_PROC = Path("/proc")


def own_mark(lock_folder: Path) -> str:
    """Return the mark of the agent that this process is."""
    folder = hashlib.sha256(bytes(lock_folder.absolute())).hexdigest()[:12]
    return f"{_pid_namespace()}-{os.getpid()}-{_start_of(os.getpid())}-{folder}"


def end_leftovers(mark: str) -> list[int]:
    """Kill every process of a dead agent with the same user, PID namespace and lock folder as the agent of `mark`.

    Returns the pids of the processes found. Call it until there are none, since a process may take seconds to release a
    GPU's memory.
    """
    found = set(_kill_groups(mark))
    found |= {pid for pid in map(int, filter(str.isdigit, os.listdir(_PROC))) if _kill_if_left(pid, mark)}  # noqa: PTH208
    if found:
        logger.warning("killing what a killed worker's job has left behind: %s", ", ".join(map(str, sorted(found))))
    return sorted(found)


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
        folder = _PROC / str(pid)
        if folder.stat().st_uid != os.geteuid():
            return False
        variables = (folder / "environ").read_bytes().split(b"\0")  # a zombie has none
    except OSError:
        return False
    name = f"{VARIABLE}=".encode()
    marks = [variable[len(name) :].decode(errors="replace") for variable in variables if variable.startswith(name)]
    return any(_is_of_dead_agent(other, mark) for other in marks)


def _is_of_dead_agent(other: str, mark: str, *, of_any_folder: bool = False) -> bool:
    namespace, _pid, _start, folder = mark.split("-")
    match other.split("-"):
        case [other_namespace, pid, start, other_folder] if pid.isdigit() and (of_any_folder or other_folder == folder):
            try:
                return other_namespace == namespace and _start_of(int(pid)) != start
            except OSError:
                return False
    return False


def _start_of(pid: int) -> str | None:
    """Return the time at which the process started, in ticks since the boot; None if it is dead.

    Raises:
        OSError: no file descriptor is left. Taking that for death would kill a live agent's jobs.
    """
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in _DEAD else fields[18]


def _pid_namespace() -> int:
    return (_PROC / "self" / "ns" / "pid").stat().st_ino


class Group:
    """The cgroup of all units of an agent. `path` is None where the kernel does not let the agent make one."""

    def __init__(self, mark: str) -> None:
        own = _own_group()
        self.path = own / f"{PREFIX}{mark}" if own is not None else None
        if self.path is not None:
            try:
                self.path.mkdir(exist_ok=True)
            except OSError as error:
                logger.debug("no cgroup: %s", error)
                self.path = None

    def add(self, pid: int) -> None:
        """Put a process into the group. Its descendants will be in it too."""
        if self.path is None:
            return
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return  # it has ended already
        except OSError as error:
            logger.warning("%s cannot be used: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Remove the group, which must be empty."""
        if self.path is not None:
            with suppress(OSError):
                self.path.rmdir()
            self.path = None


def _own_group() -> Path | None:
    """Return the folder of this process's cgroup of version 2; None where there is none."""
    try:
        mounts = (_PROC / "self" / "mountinfo").read_text().splitlines()
        groups = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    points = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    names = [line.removeprefix("0::") for line in groups if line.startswith("0::")]
    if not (points and names):
        return None
    folder = Path(points[0] + names[0])
    return folder if folder.is_dir() else None


def _kill_groups(mark: str) -> list[int]:
    """Kill the cgroups of dead agents; returns the pids that were in them. Empty ones of other folders go as well."""
    own = _own_group()
    found: list[int] = []
    for group in own.glob(f"{PREFIX}*") if own is not None else ():
        its_mark = group.name.removeprefix(PREFIX)
        if _is_of_dead_agent(its_mark, mark):
            with suppress(OSError):
                found += map(int, (group / "cgroup.procs").read_text().split())
                (group / "cgroup.kill").write_text("1")
        if _is_of_dead_agent(its_mark, mark, of_any_folder=True):
            with suppress(OSError):  # a process may still be there
                group.rmdir()
    return found
