"""The folder of an agent for the files of running jobs, on the store's own disk, so that artifacts need no copy.

The agent holds a lock on its folder, which tells the next agent that it lives. A pid could not: several containers may
share the data folder, and in each the worker has the same pid.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import CannotRunHere, DiskFull, is_no_space
from workers.working_directory import remove

_AGENTS = re.compile(r"[0-9a-f]{16}")
"""Names of agents' folders."""
_DEAD = "dead-"
"""Begins the names of folders that are being removed."""


class Scratch:
    """An agent's folder, below `root`, until `close`. Raises DiskFull, CannotRunHere: it cannot be made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.path = root / secrets.token_hex(8)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(root):  # nobody may take the new folder for a dead agent's
                self.path.mkdir(mode=0o700)
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            problem = f"{root}, the folder for the files of running jobs, cannot be used: {error.strerror}."
            raise (DiskFull(problem) if is_no_space(error) else CannotRunHere(problem)) from error

    def remove_those_of_dead_agents(self) -> None:
        """Remove the files that killed agents have left behind, and nothing else that is there."""
        with _locked(self._root):
            for folder in self._root.iterdir():
                if _is_dead(folder):
                    with suppress(OSError):
                        folder.rename(self._root / f"{_DEAD}{secrets.token_hex(8)}")
        # Only now, since others wait for the lock when they start.
        for folder in self._root.glob(f"{_DEAD}*"):
            remove(folder)

    def close(self) -> None:
        remove(self.path)
        os.close(self._lock)


def _is_dead(folder: Path) -> bool:
    if _AGENTS.fullmatch(folder.name) is None:
        return False
    try:
        with _locked(folder, fcntl.LOCK_NB, os.O_NOFOLLOW):
            return True
    except OSError:  # somebody has the lock, or it is no folder
        return False


@contextmanager
def _locked(folder: Path, how: int = 0, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)
