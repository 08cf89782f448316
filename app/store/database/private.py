"""Keeps the data folder private to its owner: results, logs and code of all jobs are in it, and a user who may write to
it can make server and worker do anything.

Files that Flopwatch makes are private from the start. Wider permissions, set by an administrator, are
corrected where that can harm nobody, and refused elsewhere; PostgreSQL does the same with its folder.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from app.errors import CannotRunHere

FOLDERS = ("artifacts", "scratch", "ceilings")
DATABASE = "flopwatch.sqlite3"
FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}.lock", "artifacts.lock", "server.lock")
UMASK = 0o077
"""The umask of server and worker, and so of jobs."""


def prepare_data_folder(path: Path, setting: str = "FLOPWATCH_DATA_DIR") -> None:
    """Make the data folder, or check an existing one, and make it and Flopwatch's files in it private. Raises
    CannotRunHere, which names the `setting` and the cure: it is no folder, belongs to another user, or others may write
    to it and it has files that are not Flopwatch's."""
    try:
        _make(path)
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise CannotRunHere(f"{path} is no folder: set {setting} to another.")
        if status.st_uid != os.geteuid():
            raise CannotRunHere(
                f"{path} belongs to the user {status.st_uid}, and this process runs as {os.geteuid()}: run server and "
                f"workers as one user who owns it, or set {setting} to another folder, maybe a new one in it."
            )
        _keep_others_out(path, stat.S_IMODE(status.st_mode), setting)
        for names, mode in ((FOLDERS, 0o700), (FILES, 0o600)):
            for name in names:
                _correct_mode(path / name, mode)
    except OSError as error:
        raise CannotRunHere(f"{setting}, {path}, cannot be used: {error.strerror}.") from error


def _make(path: Path) -> None:
    if not path.parent.exists():
        _make(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def _keep_others_out(path: Path, mode: int, setting: str) -> None:
    """Let only the owner into the folder, unless it has other programs' files, which may need its present mode."""
    if not mode & 0o077:
        return
    names = {entry.name for entry in os.scandir(path)}
    if not mode & stat.S_ISVTX and names <= {*FOLDERS, *FILES}:
        path.chmod(0o700)
    elif mode & 0o022:
        raise CannotRunHere(
            f"Others may write to {path}, which is shared, or has files that are not Flopwatch's: set "
            f"{setting} to a folder of its own, or take the others' right (chmod go-w)."
        )


def _correct_mode(path: Path, mode: int) -> None:
    # Not by a descriptor: closing a descriptor of the database's file would drop the locks that SQLite has in this
    # process. Nobody else can put a link in its place meanwhile: only the owner may write to the folder.
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        if path.suffix == ".lock":
            raise CannotRunHere(f"{path} is a symbolic link, which locks are not read through: remove it.")
        return  # to another disk, maybe
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(mode)


def make_files_private(database: Path) -> None:
    """Make a database's file and those beside it private, wherever they are, if they belong to this user.

    Raises OSError where that is not possible.
    """
    for suffix in ("", "-wal", "-shm", ".lock"):
        path = database.with_name(database.name + suffix)
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
                path.chmod(0o600)


def create_private(path: Path) -> None:
    """Create an empty file that only its owner may open, if there is none."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
