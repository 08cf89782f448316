"""File systems that tests mount, where the user may; full disks, and files that cannot grow."""

import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a file system in memory, with options such as "size=2m"; skip the test if that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(("mode=0700", *options)), "flopwatch-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path, *, but: int = 0) -> Iterator[None]:
    """Fill the disk of `folder`, but for so many bytes, while inside; other processes may write meanwhile."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="filler-") as filler:
        space = os.statvfs(folder)
        size, step = 0, space.f_bavail * space.f_frsize - but
        while step >= 4096:
            try:
                os.posix_fallocate(filler.fileno(), size, step)
            except OSError:  # that much is not there
                step //= 2
                continue
            size += step
            if but:
                break
        yield


@contextlib.contextmanager
def file_size_limit(pid: int, limit: int) -> Iterator[None]:
    """Let no file of the process, if it is there, grow beyond `limit` bytes while inside."""
    before = None
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
