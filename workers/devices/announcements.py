"""Announces to workers of other users on the host which devices are in use, and reads their announcements.

Each user has a folder for locks. The locks between the user's own workers are files there that nobody else can open.
Beside them is one file for everybody to read, always empty: a lease takes shared locks on bytes of it, one for each
device, by the device's name (see app/store/database/byte_locks.py). Others open it for reading and ask the kernel if
a byte is locked.

A user can keep others from a device by announcing it, as by using it, but cannot keep anybody from announcing: a file
that is open for reading only takes shared locks, and these do not exclude each other. A folder that another user could
have made is not trusted: its name must be that of its owner, and nobody else may write to it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import InvalidEnvironment
from app.store.database import byte_locks

FILE = "announced"
PREFIX = "flopwatch-locks-"
_FOLDER = re.compile(rf"{PREFIX}(\d+)")
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of this user's folder for locks, which is made if it does not exist.

    Raises:
        InvalidEnvironment: it is a link, or another user made it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o755)
    try:
        descriptor = os.open(path, _OPEN | os.O_DIRECTORY)
    except OSError as error:
        told = f"{path}, the folder for device locks, cannot be used: {error.strerror}. {_CURE}"
        raise InvalidEnvironment(told) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise InvalidEnvironment(
                f"{path}, the folder for device locks, belongs to the user {found.st_uid}, and this worker runs as "
                f"{os.geteuid()}. {_CURE}"
            )
        if stat.S_IMODE(found.st_mode) != 0o755:
            os.fchmod(descriptor, 0o755)
        yield descriptor
    finally:
        os.close(descriptor)


_CURE = "Somebody else may have made it: remove it, or name another folder for all workers of this host by TMPDIR."


def announce(folder: int, names: Sequence[str]) -> int:
    """Announce the names; returns the descriptor that holds the announcement."""
    descriptor = os.open(FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    try:
        os.fchmod(descriptor, 0o644)  # whatever the umask is
        for name in names:
            byte_locks.share(descriptor, byte_locks.byte_of(name))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def withdraw(announcement: int, names: Sequence[str]) -> None:
    """Withdraw the announcement of these names."""
    for name in names:
        byte_locks.unlock(announcement, byte_locks.byte_of(name))


class Others:
    """Reads the announcements of other users' workers.

    Their folders are listed only on request, since a folder for temporary files may have many thousand entries. Each
    look opens one file at a time, and reads the locks themselves.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._uids: list[int] | None = None

    def list_afresh(self) -> None:
        """List the present folders. A user without a folder announces nothing."""
        with os.scandir(self._parent) as entries:
            users = [_user_of(entry) for entry in entries]
        self._uids = [uid for uid in users if uid is not None and uid != os.geteuid()]

    def have(self, names: Sequence[str]) -> set[str]:
        """Return those of the names that another user announces, as far as folders are listed.

        Raises:
            OSError: no file descriptor is left, so the answer is unknown.
        """
        if self._uids is None:
            self.list_afresh()
        found: set[str] = set()
        for uid in self._uids or ():
            try:
                file = _announcements_of(self._parent / f"{PREFIX}{uid}", uid)
            except OSError as error:
                if error.errno in _NO_ANNOUNCEMENTS:
                    continue
                raise
            try:
                found |= {name for name in names if byte_locks.is_locked(file, byte_locks.byte_of(name))}
            finally:
                os.close(file)
        return found


_NO_ANNOUNCEMENTS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)
"""Errors that mean that there is nothing to read: the entry is gone, is not a folder with such a file, or is private,
as folders of earlier versions are."""


def _user_of(entry: os.DirEntry[str]) -> int | None:
    """Return the user whose folder for locks this is; None if it is not one. A user has at most one, named without
    leading zeros."""
    match = _FOLDER.fullmatch(entry.name)
    if match is None or entry.name != f"{PREFIX}{int(match[1])}":
        return None
    try:
        owner = entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None
    return owner if owner == int(match[1]) else None


def _announcements_of(path: Path, uid: int) -> int:
    folder = os.open(path, _OPEN | os.O_DIRECTORY)
    try:
        _check_owner(folder, uid)
        file = os.open(FILE, _OPEN, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_owner(file, uid)
    except OSError:
        os.close(file)
        raise
    return file


def _check_owner(descriptor: int, uid: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != uid or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"not the user {uid}'s alone")
