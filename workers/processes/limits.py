"""Limits of a unit's process and its descendants, so that their faults end the job and not the agent."""

import resource
from contextlib import suppress
from pathlib import Path

OOM_SCORE_ADJ = 1000
"""The highest value: when memory runs out, the kernel ends a job's process before any other."""
OPEN_FILES = 65_536
"""Most open files of a job's process."""


def limit_unit() -> None:
    """Limit this process, which is a unit's. A limit that is already lower stays; a process that cannot be limited runs
    as the agent does."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    _lower(resource.RLIMIT_CORE, 0)  # that of a measuring process would have gigabytes
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)


def _lower(name: int, limit: int) -> None:
    soft, hard = (limit if old == resource.RLIM_INFINITY else min(old, limit) for old in resource.getrlimit(name))
    with suppress(OSError, ValueError):
        resource.setrlimit(name, (soft, hard))
