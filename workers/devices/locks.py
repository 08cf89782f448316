"""Locks the devices of a job: no two workers of one host, of whatever users, measure on one GPU at a time, and a CPU
measurement runs alone.

Each device is locked by flock on a file of its own, in a folder that all users of the host share. Everybody may read
these files, which is all that flock needs. Only the user who made a file, or the folder, can remove it. A user who
holds a lock for ever blocks a device, as one who uses it for ever does. A job's keeper inherits the locks: a device is
free only when no process of the job is left.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.errors import CannotRunHere
from workers.devices.discovery import Gpu, Host

SHARED = 0o1777
"""Mode of the folder: all users add files, and change only their own."""
READABLE = 0o1644
"""Mode of a lock's file; systemd-tmpfiles keeps a file with this first bit, however old."""
CHOOSING, HOST, AGENTS = "choosing", "host", "agents"
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CURE = "Remove it, or name another folder for all workers of this host by TMPDIR."


@dataclass
class HeldDevices:
    """Locked devices. The job's keeper gets its `descriptors`, one for each lock that is held: `choosing`, the host's,
    and one for each GPU."""

    gpus: tuple[Gpu, ...] = ()
    alone: bool = False
    descriptors: list[int] = field(default_factory=list)
    taken: frozenset[str] | None = None
    """The devices that jobs of all agents hold: UUIDs of GPUs, and HOST if no job could run alone now. None: unknown,
    since another agent is choosing."""

    def release(self) -> None:
        """Close our copies of the locks. A keeper may still hold its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def lock_folder() -> Path:
    """Return the folder for locks, also while its disk is full: then tempfile's would be another one, with which two
    workers share their devices."""
    folder = os.environ.get("TMPDIR", "")
    return Path(folder if os.access(folder, os.W_OK) else "/tmp", "flopwatch-locks")  # noqa: S108


class DeviceLocks:
    """The host's locks. It never waits for a lock: a locked device is not free now.

    A job that runs alone locks the file `host` exclusively, other jobs share the lock. The agent knows only after the
    claim which of the two a job needs, and flock cannot convert a lock in one step: it releases the lock first, and
    then another process may take it for hours. So an agent holds the lock `choosing` while it takes locks, and until it
    has released those that the job does not need.

    Each agent shares the lock `agents`, so that one that ends a job knows whether it has to let others begin one.
    Raises CannotRunHere: the folder or a file for locks cannot be used; the error says why, and the cure.
    """

    has_company = False
    """True if the host has other agents, as far as the last `take_free` saw."""

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        self._host = host
        self._folder = folder or lock_folder()
        self._present: int | None = None
        with _shared_folder(self._folder) as opened:
            for name in (CHOOSING, HOST, AGENTS, *map(_name_of, host.gpus)):
                os.close(self._open(opened, name))

    def take_free(self) -> HeldDevices:
        """Lock everything that is free: every free GPU, and the host, exclusively if nobody else holds it, otherwise
        shared.

        Without descriptors, another job has the host alone, or another agent is choosing. Raises CannotRunHere: the
        folder or a file for locks cannot be used; OSError: no descriptor is left, or the disk is full. No lock is held
        then.
        """
        held = HeldDevices()
        try:
            # The folder is made at every call, because hosts clean their folders for temporary files.
            with _shared_folder(self._folder) as folder:
                self._lock_free(folder, held)
        except BaseException:
            # A lock that is never released would stop every agent of this host.
            held.release()
            raise
        return held

    def _lock_free(self, folder: int, held: HeldDevices) -> None:
        choosing = self._lock(folder, CHOOSING, fcntl.LOCK_EX)
        if choosing is None:
            return
        held.descriptors.append(choosing)
        self._meet_others(folder)
        alone = self._lock(folder, HOST, fcntl.LOCK_EX)
        host = alone if alone is not None else self._lock(folder, HOST, fcntl.LOCK_SH)
        if host is None:
            held.release()
            held.taken = frozenset({HOST, *(gpu.uuid for gpu in self._host.gpus)})
            return
        held.descriptors.append(host)
        held.alone = alone is not None
        for gpu in self._host.gpus:
            descriptor = self._lock(folder, _name_of(gpu), fcntl.LOCK_EX)
            if descriptor is not None:
                held.gpus += (gpu,)
                held.descriptors.append(descriptor)
        locked = {gpu.uuid for gpu in self._host.gpus} - {gpu.uuid for gpu in held.gpus}
        held.taken = frozenset(locked if held.alone else locked | {HOST})

    def _meet_others(self, folder: int) -> None:
        """Note whether there are other agents. Only while choosing: they would take our exclusive lock for company."""
        self.close()
        self._present = alone = self._lock(folder, AGENTS, fcntl.LOCK_EX)
        self.has_company = alone is None
        if alone is None:
            self._present = self._lock(folder, AGENTS, fcntl.LOCK_SH)
        else:
            fcntl.flock(alone, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let other agents know that this one has gone."""
        present, self._present = self._present, None
        if present is not None:
            os.close(present)

    def keep_only(self, held: HeldDevices, *, gpus: int, alone: bool) -> HeldDevices:
        """Release all but the first `gpus` GPUs, and share the host unless `alone`; then others may choose."""
        choosing, host, *locks = held.descriptors
        if not alone:
            fcntl.flock(host, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for descriptor in (*locks[gpus:], choosing):
            os.close(descriptor)
        return HeldDevices(held.gpus[:gpus], alone, [host, *locks[:gpus]])

    def _lock(self, folder: int, name: str, operation: int) -> int | None:
        """Lock a file of the folder, and return its descriptor; None if another process holds the lock."""
        descriptor = self._open(folder, name)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            # The file was removed since it was opened: the next worker will lock a new one.
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _open(self, folder: int, name: str) -> int:
        """Open a lock's file, which is made if it does not exist. Raises CannotRunHere: another user made it
        unreadable, a link, or something that is not a file."""
        path = self._folder / f"{name}.lock"
        try:
            descriptor = _open_or_make(folder, path.name)
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno not in _TRAPS:
                raise
            raise CannotRunHere(f"{path}, a device lock, cannot be used: {error.strerror}. {_CURE}") from error
        try:
            _check_file(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


_TRAPS = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def _open_or_make(folder: int, name: str) -> int:
    # Not by O_CREAT alone: Linux refuses it for another user's file in a folder that all users share
    # (fs.protected_regular).
    while True:
        with suppress(FileNotFoundError):
            return os.open(name, _OPEN, dir_fd=folder)
        with suppress(FileExistsError):
            return os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, READABLE, dir_fd=folder)


def _check_file(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise CannotRunHere(f"{path}, a device lock, is not a file. {_CURE}")
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != READABLE:
        os.fchmod(descriptor, READABLE)  # whatever the umask was when it was made


def _name_of(gpu: Gpu) -> str:
    # UUIDs of MIG instances in the old format contain slashes.
    return gpu.uuid.replace("/", "_")


@contextmanager
def _shared_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder for locks, which is made if it does not exist. Raises CannotRunHere: it cannot
    be made, is a link, or not a folder in which all users may make files."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=SHARED)
        folder = os.open(path, _OPEN | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise CannotRunHere(
            f"{path}, the folder for device locks, cannot be used: {error.strerror}. {_CURE}"
        ) from error
    try:
        status = os.fstat(folder)
        if stat.S_IMODE(status.st_mode) != SHARED:
            if status.st_uid != os.geteuid():
                raise CannotRunHere(
                    f"{path}, the folder for device locks, is not for all users (mode 1777): the user {status.st_uid}"
                    f" has made it otherwise. {_CURE}"
                )
            os.fchmod(folder, SHARED)  # whatever the umask was
        yield folder
    finally:
        os.close(folder)
