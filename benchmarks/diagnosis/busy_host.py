"""A host that is busy where one rank of a step runs: the rank shares a core with processes that compute."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.process_group import REQUEST

BUSY = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
BESIDE = 3
"""Processes that share the core."""


@contextmanager
def busy_beside(rank: int) -> Iterator[None]:
    """Move the present processes of this rank to one core, of which each has a share in the context."""
    core = max(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) for _ in range(BESIDE)]
    try:
        for process in _of_rank(rank):
            for thread in (process / "task").iterdir():
                with suppress(OSError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread.name), [core])
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _of_rank(rank: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or ended
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and any(one.startswith(REQUEST.encode()) for one in variables):
                yield process
