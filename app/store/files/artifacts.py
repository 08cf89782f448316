"""Artifact files, named after their content: `ab/cdef…` under one folder, written whole or not at all.

A content is written to a temporary file, which is synced and gets its name, and the folder is synced; only then may a
row of the table `artifact` or `code_file` refer to it. Between the two, the content is *held*: put() keeps a shared
lock on a byte of its own, in one lock file for all contents, until release(), or until the process ends in any way. So
a process holds any number of contents with one descriptor.
Nobody removes a content that is referred to or held: removal looks for references inside the database's write lock, so
that none can appear meanwhile, and it finds holds by trying for the exclusive lock. A file that nobody
refers to in the end, for example since its writer was killed, stays until remove_unreferenced.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import stat
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from sqlalchemy import Connection

from app.errors import Damaged, DiskFull, NotFound, StorageFailed, is_no_space
from app.store.database.engine import Database
from app.store.database.moved import NOTE
from app.store.files.owner import OwnedFiles, Owner, owner_of
from app.store.files.store import Check, FolderContent, accept, batches, referenced
from app.store.records import Claim

CHUNK_BYTES = 1 << 20
PROBE_BYTES = 1 << 20
SYNC_BYTES = 64 << 20
"""A copy is synced each time that it has grown by so many bytes: one sync of gigabytes could not be interrupted."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock: type, whence, start, length, pid."""


class ArtifactFiles(OwnedFiles):
    """The contents below one folder, on a local disk; threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._locks = folder.with_name(f"{folder.name}.lock")
        self._guard = threading.Lock()
        self._held: Counter[str] = Counter()
        self._descriptor: int | None = None

    def put(self, path: Path, check: Check = accept, claim: Claim | None = None) -> tuple[str, int]:
        """Store a copy of the file `path` for the claim, and hold its content; returns its SHA-256 and its size in
        bytes. Raises DiskFull, StoreUnreachable, LeaseLost, or what `check` raises, and then leaves nothing behind."""
        del claim  # a lock holds the content, whoever has it
        with self._space_errors(), opened(path) as file:
            check(os.fstat(file.fileno()).st_size)
            return self._stored(file, check)

    def put_bytes(self, content: bytes) -> tuple[str, int]:
        """Store a content that is in memory, and hold it; else as put()."""
        with self._space_errors():
            return self._stored(io.BytesIO(content), accept)

    def _stored(self, reader: BinaryIO, check: Check) -> tuple[str, int]:
        temporary = self._incoming / uuid.uuid4().hex
        self._make_folder(self._incoming)
        try:
            sha256, size = _copy(reader, temporary, check)
            self._name(temporary, sha256)
        finally:
            temporary.unlink(missing_ok=True)
        return sha256, size

    def _name(self, temporary: Path, sha256: str) -> None:
        target = self._path(sha256)
        if not target.parent.is_dir():
            self._make_folder(target.parent)
            _sync_folder(self._folder)
        self._hold(sha256)
        try:
            temporary.replace(target)  # maybe of the same content, unless the disk has changed that
            _sync_folder(target.parent)
        except BaseException:
            self.release([sha256])
            raise

    def _hold(self, sha256: str) -> None:
        """Hold a content, which need not be there yet; wait while somebody removes it."""
        with self._guard:
            if self._descriptor is None:
                self._descriptor = self._open_locks()
            if not self._held[sha256]:
                _lock(self._descriptor, sha256, fcntl.F_RDLCK, wait=True)
            self._held[sha256] += 1

    def release(self, sha256s: Iterable[str]) -> None:
        """End the hold of one put() of each content: its row is committed, or will never be."""
        with self._guard:
            for sha256 in sha256s:
                self._held[sha256] -= 1
                if not self._held[sha256]:
                    del self._held[sha256]
                    assert self._descriptor is not None
                    _lock(self._descriptor, sha256, fcntl.F_UNLCK)

    def check_locks(self) -> None:
        """Raise OSError if the lock file, which is beside the folder, cannot be opened."""
        os.close(self._open_locks())

    def _open_locks(self) -> int:
        return os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _make_folder(self, folder: Path) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def check_kept(self, connection: Connection, sha256: str) -> None:
        """Do nothing: the lock holds it."""

    def open(self, sha256: str) -> FolderContent:
        """Return a content; raises NotFound when there is none."""
        path = self.open_path(sha256)
        return FolderContent(path, sha256, path.stat().st_size)

    def open_path(self, sha256: str) -> Path:
        """Return the file of a content; raises NotFound when there is none."""
        path = self._path(sha256)
        if not path.is_file():
            raise NotFound("The artifact's file is gone.")
        return path

    def read(self, sha256: str) -> bytes:
        """Return a content. Raises NotFound when there is no such file, and Damaged when it has another content."""
        content = self.open_path(sha256).read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Damaged(f"The disk has changed the file {sha256}: upload it again (PUT /files/{sha256}).")
        return content

    def probe(self) -> None:
        """Find out whether a file can be stored. Raises DiskFull when the disk has no room or no inode left, and
        StorageFailed when it cannot be written."""
        try:
            with self._space_errors():
                self._make_folder(self._incoming)
                with TemporaryFile(dir=self._incoming) as file:
                    os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
        except OSError as error:
            reason = f"{error.strerror}. The system's log may say more about its disk."
            raise StorageFailed(f"No file can be stored in {self._folder}: {reason}") from error

    def remove(self, sha256s: Iterable[str], database: Database) -> list[str]:
        """Remove the contents that nothing refers to and nobody holds; returns the removed ones."""
        candidates = sorted({sha256 for sha256 in sha256s if self._path(sha256).exists()})
        if not candidates or not self.may_remove(database):
            return []
        removed: list[str] = []
        locks = self._open_locks()  # of its own: holds of this very process count as well
        try:
            for batch in batches(candidates):
                with database.write() as connection:
                    referred = referenced(connection, batch)
                    removed += [sha256 for sha256 in batch if sha256 not in referred and self._remove(sha256, locks)]
        finally:
            os.close(locks)
        return removed

    def _remove(self, sha256: str, locks: int) -> bool:
        if not try_exclusive(locks, sha256):
            return False
        try:
            self._path(sha256).unlink()
        except FileNotFoundError:
            return False
        finally:
            _lock(locks, sha256, fcntl.F_UNLCK)
        return True

    def remove_unreferenced(self, database: Database, older_than_s: float) -> list[str]:
        """Remove and return contents older than `older_than_s` seconds that no row refers to and nobody holds."""
        before = self._now() - older_than_s
        for path in self._incoming.glob("*"):
            if _modified(path) < before:
                path.unlink(missing_ok=True)
        return self.remove(self._unknown(database, before), database)

    def _unknown(self, database: Database, before: float) -> list[str]:
        """Return the contents older than `before` (seconds since 1970) that no row refers to."""
        old = [path for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if _modified(path) < before]
        unknown: list[str] = []
        for batch in batches([path.parent.name + path.name for path in old]):
            with database.read() as connection:
                unknown += set(batch) - referenced(connection, batch)
        return unknown

    def _now(self) -> float:
        """Return the time on the clock that dates the files, which may be another host's; seconds since 1970."""
        self._make_folder(self._incoming)
        with self._space_errors(), TemporaryFile(dir=self._incoming) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime

    def __str__(self) -> str:
        return str(self._folder)

    def owner_for(self, database: Database) -> Owner:
        return owner_of(database, self._folder)

    def read_note(self) -> bytes | None:
        try:
            return (self._folder / NOTE).read_bytes()
        except FileNotFoundError:
            return None

    def write_note(self, content: bytes) -> None:
        self._make_folder(self._incoming)
        temporary = self._incoming / uuid.uuid4().hex
        _copy(io.BytesIO(content), temporary, accept)
        temporary.replace(self._folder / NOTE)
        _sync_folder(self._folder)

    def has_unknown(self, database: Database) -> bool:
        return bool(self._unknown(database, before=float("inf")))

    def _path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise NotFound(f"{sha256!r} is no SHA-256.")
        return self._folder / sha256[:2] / sha256[2:]

    @contextmanager
    def _space_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_no_space(error):
                raise
            raise DiskFull(f"The artifact does not fit on the disk of {self._folder}: {error.strerror}.") from error


def try_exclusive(descriptor: int, sha256: str) -> bool:
    """Take the exclusive lock of a content; False if another descriptor has any lock of it."""
    try:
        _lock(descriptor, sha256, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, sha256: str, kind: int, *, wait: bool = False) -> None:
    """Lock or unlock a content's byte, which need not exist, by an open file description lock (fcntl(2)): it belongs to
    the descriptor, ends with its process, however that ends, and excludes others also within one process."""
    byte = int(hashlib.sha256(sha256.encode()).hexdigest()[:15], 16)
    how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(descriptor, how, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def opened(path: Path) -> BinaryIO:
    """Open a regular file. Its maker may have put a link or a pipe in its place: OSError, and no waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _copy(reader: BinaryIO, target: Path, check: Check) -> tuple[str, int]:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as writer:
        digest, size, unsynced = hashlib.sha256(), 0, 0
        while chunk := reader.read(CHUNK_BYTES):
            size += len(chunk)
            check(size)
            digest.update(chunk)
            writer.write(chunk)
            unsynced += len(chunk)
            if unsynced >= SYNC_BYTES:
                os.fdatasync(descriptor)
                unsynced = 0
        writer.flush()
        os.fsync(descriptor)
    return digest.hexdigest(), size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
