"""Limits of a unit's process and its descendants, so that their faults end the job and not the agent."""

import resource
from contextlib import suppress
from pathlib import Path

OOM_SCORE_ADJ = 1000
"""The highest value: when memory runs out, the kernel ends a job's process before any other."""
OPEN_FILES = 65_536
"""Most open files of a job's process."""
RESERVED_PROCESSES = 512
"""Processes and threads of the user that jobs leave for the agent."""
THREADS_MAX = Path("/proc/sys/kernel/threads-max")


def limit_unit() -> None:
    """Limit this process, which is a unit's. A limit that is already lower stays; a process that cannot be limited runs
    as the agent does."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    _lower(resource.RLIMIT_CORE, 0)  # that of a measuring process would have gigabytes
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, _processes_of_jobs())


def _processes_of_jobs() -> int:
    """Return the number of the user's processes and threads at which a unit can start no more.

    The kernel compares the number of all the user's processes with the limit of the process that starts one. The
    agent's limit is higher, so it still starts threads. The kernel limits no process of root.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [hard] if hard != resource.RLIM_INFINITY else []
    with suppress(OSError, ValueError):
        limits.append(int(THREADS_MAX.read_text()))
    if not limits:
        return resource.RLIM_INFINITY
    return min(limits) - min(RESERVED_PROCESSES, min(limits) // 4)


def _lower(name: int, limit: int) -> None:
    if limit == resource.RLIM_INFINITY:
        return
    soft, hard = (limit if old == resource.RLIM_INFINITY else min(old, limit) for old in resource.getrlimit(name))
    with suppress(OSError, ValueError):
        resource.setrlimit(name, (soft, hard))
