"""Artifact files, named after their content: `ab/cdef…` under one folder, written whole or not at all.

A content is written to a temporary file, or is a file on the same disk that nobody writes to any more. It is synced,
linked to its name, and the folder is synced; only then may a row of the table `artifact` refer to it. Between the two,
the content is *held*: put() or take() keeps a shared lock on the file until release(), or until the process ends in
any way. Nobody removes a content that is referred to or held: removal looks for references inside the database's write
lock, so that none can appear meanwhile, and it finds holds by trying for the exclusive lock. If a hold kept a content
from removal and no row refers to it in the end, the content is an orphan, which sweep_orphans removes later.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, select

from app.errors import DiskFull, NotFound, is_no_space
from app.store import tables
from app.store.engine import Database

CHUNK_BYTES = 1 << 20
BATCH = 500
"""Number of contents that one transaction looks at."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactFiles:
    """The contents below one folder, on a local disk; threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._guard = threading.Lock()
        self._held: dict[str, list[int]] = {}

    def put(self, path: Path) -> tuple[str, int]:
        """Store a copy of the file `path` and hold it; returns its SHA-256 and its size in bytes.

        Raises DiskFull, and then leaves nothing behind.
        """
        temporary = self._incoming / uuid.uuid4().hex
        with self._space_errors():
            self._incoming.mkdir(parents=True, exist_ok=True)
            try:
                sha256, size = _copy(path, temporary)
                self._link(temporary, sha256)
            finally:
                temporary.unlink(missing_ok=True)
        return sha256, size

    def take(self, path: Path) -> tuple[str, int]:
        """Store the file `path` itself and hold it, so that `path` no longer exists; returns what put() does.

        The caller sees to it that nobody writes to the file any more. The file is copied only if it lies on another
        disk, belongs to another user, or has a second name by which somebody might change the stored content. It gets
        the same permissions as a file that put() stores: its maker may have set stricter ones, as `tempfile.mkstemp`
        does, and the server may run as another user than the worker.

        Raises DiskFull; then the file stays where it is.
        """
        with self._space_errors():
            stored = self._linked(path) if path.lstat().st_nlink == 1 else None
        if stored is None:
            stored = self.put(path)
        path.unlink()
        return stored

    def _linked(self, path: Path) -> tuple[str, int] | None:
        """Link the file to its content's name; return None if it lies on another disk or belongs to another user."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if path.stat().st_dev != self._folder.stat().st_dev:
            return None
        try:
            with path.open("rb") as file:
                os.fchmod(file.fileno(), self._new_files_mode())
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
                os.fsync(file.fileno())
            self._link(path, sha256)
        except OSError as error:
            # The file lies across a bind mount or belongs to somebody else, or this disk has no hard links.
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                return None
            raise
        return sha256, size

    def _new_files_mode(self) -> int:
        """Return the permissions that put() gives. Asking for the umask would change it for the whole process."""
        self._incoming.mkdir(exist_ok=True)
        sample = self._incoming / uuid.uuid4().hex
        with sample.open("xb") as file:
            sample.unlink()
            return stat.S_IMODE(os.fstat(file.fileno()).st_mode)

    def _link(self, temporary: Path, sha256: str) -> None:
        target = self._path(sha256)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_folder(self._folder)
        while not self._hold(sha256, target):  # if the same content came from elsewhere, hold that file
            lock = _locked(temporary)
            assert lock is not None
            try:
                # A rename would replace a file that others hold.
                target.hardlink_to(temporary)
            except OSError as error:
                os.close(lock)
                if isinstance(error, FileExistsError):
                    continue
                raise
            self._remember(sha256, lock)
            break
        _sync_folder(target.parent)

    def _hold(self, sha256: str, path: Path) -> bool:
        lock = _locked(path)
        if lock is None:
            return False
        self._remember(sha256, lock)
        return True

    def _remember(self, sha256: str, lock: int) -> None:
        with self._guard:
            self._held.setdefault(sha256, []).append(lock)

    def release(self, sha256s: Iterable[str]) -> None:
        """End the hold of one put() or take() of each content: its row is committed, or will never be."""
        with self._guard:
            for sha256 in sha256s:
                locks = self._held[sha256]
                os.close(locks.pop())
                if not locks:
                    del self._held[sha256]

    def open_path(self, sha256: str) -> Path:
        """Return the file of a content; raises NotFound when there is none."""
        path = self._path(sha256)
        if not path.is_file():
            raise NotFound("The artifact's file is gone.")
        return path

    def remove(self, sha256s: Iterable[str], database: Database) -> list[str]:
        """Remove the contents that no artifact refers to and nobody holds; returns the removed ones."""
        removed: list[str] = []
        for batch in _batches(sorted(set(sha256s))):
            with database.write() as connection:
                referred = _referred(connection, batch)
                removed += [sha256 for sha256 in batch if sha256 not in referred and _remove(self._path(sha256))]
        return removed

    def sweep_orphans(self, database: Database, older_than_s: float) -> list[str]:
        """Remove and return contents older than `older_than_s` seconds that nothing refers to or holds."""
        before = time.time() - older_than_s
        for path in self._incoming.glob("*"):
            if _modified(path) < before:
                path.unlink(missing_ok=True)
        old = [path for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if _modified(path) < before]
        contents = [path.parent.name + path.name for path in old]
        orphans: list[str] = []
        for batch in _batches(contents):
            with database.read() as connection:
                orphans += set(batch) - _referred(connection, batch)
        return self.remove(orphans, database)

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


def _copy(source: Path, target: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest(), size


def _locked(path: Path, mode: int = fcntl.LOCK_SH) -> int | None:
    """Lock the file and return its descriptor; None without a file, or if `mode` does not wait and others hold it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, mode)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)  # held by others, or removed while this was waiting
    return None


def _remove(path: Path) -> bool:
    lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return False
    path.unlink()
    os.close(lock)
    return True


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


def _batches(contents: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(contents), BATCH):
        yield contents[start : start + BATCH]


def _referred(connection: Connection, sha256s: Sequence[str]) -> set[str]:
    sha256 = tables.artifact.c.sha256
    return set(connection.execute(select(sha256).where(sha256.in_(sha256s)).distinct()).scalars())
