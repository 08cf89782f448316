"""The folder in which a unit runs: an empty one of its own, or its own copy of the folder that its code came with.

It lies in the unit's scratch folder, which the agent removes after the unit, and the next agent if this one is killed.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

EMPTY = "work"
"""Name of the empty folder in a unit's scratch folder."""


def enter(folder: Path) -> None:
    """Make a folder this process's working directory, also for what goes by the shell's variable."""
    os.chdir(folder)
    os.environ["PWD"] = str(folder)


def enter_empty(scratch: Path) -> None:
    folder = scratch / EMPTY
    folder.mkdir(exist_ok=True)
    enter(folder)


def bytes_below(folder: Path) -> int:
    """Return the bytes that the files in a folder take on the disk; files that vanish meanwhile do not count."""
    total, waiting = 0, [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


def remove(folder: Path) -> None:
    """Remove a folder, also where a job has locked folders inside of it. Raises nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.chmod(0o700)
    for at, names, _files in os.walk(folder):
        for place in (Path(at, name) for name in names):
            if not place.is_symlink():
                with suppress(OSError):
                    place.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
