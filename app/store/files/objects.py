"""Artifact files on an object store, by obstore. Each object has a name that is used once, and a row of the table
`stored_object` before it exists; decision 16 has the reasons.

    row (attempt) ─→ upload ─→ row (+ SHA-256) ─→ finish: the artifact's row, and the attempt ends
    nothing refers to it, no attempt holds it ─→ row (removing) ─→ delete ─→ no row

No request to the store is made inside a transaction.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from sqlalchemy import ColumnElement, Connection, delete, insert, literal_column, select, update

from app.errors import CannotRunHere, Damaged, LeaseLost, NotFound, StorageFailed, StoreUnreachable
from app.settings import OBJECT_STORES
from app.store import tables
from app.store.database.engine import Database
from app.store.database.moved import NOTE
from app.store.files.artifacts import ArtifactFiles, opened
from app.store.files.owner import OwnedFiles, Owner, id_of_files, owner_of
from app.store.files.store import BATCH, Check, accept, batches
from app.store.records import Claim
from app.store.tables import utc_now

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url
except ModuleNotFoundError as error:
    raise CannotRunHere("An object store needs obstore: install flopwatch[objects].") from error
if TYPE_CHECKING:
    from obstore.store import S3Store

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
PART_BYTES = 8 << 20
"""Bytes of a part of an upload, and of one request of a download. A smaller file is uploaded in one request."""
MAX_PARTS = 9000
"""S3 takes 10 000."""
PARTS_AT_ONCE = 4
REQUEST_S = 30
"""Seconds that one request may take: 8 MiB at 2 Mbit/s."""
RETRIES = 2
"""Repetitions of a failed request within REQUEST_S. Whoever stores files repeats the whole for longer."""
PROBE_S = 5
LIST_EVERY_S = 86_400.0
PAUSE_S = 60.0
"""Seconds for which remove() does not try again: deleting many jobs would wait for each request to a hanging store."""
PROBE = "probe"
"""The object that probe() overwrites."""

_object, _attempt = tables.stored_object.c, tables.attempt.c
_RUNNING = select(_attempt.id).where(_attempt.state == literal_column("'running'"))
_REFERRED = (
    select(tables.artifact.c.id).where(tables.artifact.c.sha256 == _object.sha256).exists()
    | select(tables.code_file.c.sha256).where(tables.code_file.c.sha256 == _object.sha256).exists()
)


def _removable(before: datetime) -> ColumnElement[bool]:
    """The condition for objects that nothing refers to and no attempt holds; one without attempt must be older."""
    has_attempt = _object.attempt_id.is_not(None)  # SQL takes null for none of no attempts
    held_by_none = (has_attempt & _object.attempt_id.not_in(_RUNNING)) | (~has_attempt & (_object.created_at < before))
    return _object.removing | (held_by_none & ~_REFERRED)


@dataclass(frozen=True)
class ObjectContent:
    """A content on an object store."""

    store: S3Store
    name: str
    sha256: str
    size: int

    async def check(self, size: int) -> None:
        """Raise NotFound when the object is missing, Damaged when it has another size, and StoreUnreachable."""
        with _store_errors(reading=True):
            actual = (await obstore.head_async(self.store, self.name))["size"]
        if actual != size:
            raise Damaged(f"The object {self.name} is damaged: {actual} bytes, expected {size}.")

    def head(self, limit: int) -> bytes:
        """Return its first bytes, `limit` at most. Raises NotFound, Damaged or StoreUnreachable."""
        stop = min(limit, self.size)
        with _store_errors(reading=True):
            content = b"".join(
                obstore.get_range(self.store, self.name, start=begin, end=end) for begin, end in _parts(0, stop)
            )
        if stop == self.size:
            _check_digest(self.sha256, hashlib.sha256(content).hexdigest(), self.name)
        return content

    async def stream(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` to before `stop`. If these are all, and are not what was stored, it raises
        Damaged before the last part."""
        digest = hashlib.sha256()
        for begin, end in _parts(start, stop):
            with _store_errors(reading=True):
                part = bytes(await obstore.get_range_async(self.store, self.name, start=begin, end=end))
            digest.update(part)
            if (start, end) == (0, self.size):
                _check_digest(self.sha256, digest.hexdigest(), self.name)
            yield part


class ObjectFiles(OwnedFiles):
    """The files of one database on an object store; threads and processes of any host may share them.

    url: s3://bucket/prefix, gs://… or az://…; obstore reads credentials and options from the environment.
    """

    def __init__(self, url: str, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = f"{url.rstrip('/')}/{id_of_files(database)}"
        self._database = database
        self._store = _open(self.url, REQUEST_S, RETRIES)
        self._probed = _open(self.url, PROBE_S, 0)
        self._clock = clock
        self._list_after = self._remove_after = clock()

    def put(self, path: Path, check: Check = accept, claim: Claim | None = None) -> tuple[str, int]:
        """See ArtifactFiles.put."""
        with opened(path) as file:
            expected = os.fstat(file.fileno()).st_size
            check(expected)
            return self._put(file, expected, check, claim)

    def put_bytes(self, content: bytes) -> tuple[str, int]:
        """Store a content that is in memory, unless it is there and whole; see ArtifactFiles.put_bytes."""
        sha256 = hashlib.sha256(content).hexdigest()
        with suppress(NotFound, Damaged):
            if self.read(sha256) == content:
                return sha256, len(content)
        return self._put(io.BytesIO(content), len(content), accept, None)

    def _put(self, file: BinaryIO, expected: int, check: Check, claim: Claim | None) -> tuple[str, int]:
        name = secrets.token_hex(16)
        with self._database.write() as connection:
            _check_runs(connection, claim)
            attempt_id = None if claim is None else claim.attempt_id
            row = {"name": name, "attempt_id": attempt_id, "created_at": utc_now()}
            connection.execute(insert(tables.stored_object), row)
        sha256, size = self._upload(name, file, expected, check)
        with self._database.write() as connection:
            _check_runs(connection, claim)
            ended = update(tables.stored_object).where(_object.name == name, ~_object.removing)
            if not connection.execute(ended.values(sha256=sha256, size=size)).rowcount:
                raise StorageFailed("The file was removed while it was uploaded: upload it again.")
        return sha256, size

    def _upload(self, name: str, file: BinaryIO, expected: int, check: Check) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal size
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                check(size)
                digest.update(chunk)
                yield chunk

        with _store_errors():
            if expected <= PART_BYTES:
                obstore.put(self._store, name, b"".join(chunks()), use_multipart=False)
            else:
                part = max(PART_BYTES, expected // MAX_PARTS)
                obstore.put(self._store, name, chunks(), chunk_size=part, max_concurrency=PARTS_AT_ONCE)
        return digest.hexdigest(), size

    def release(self, sha256s: Iterable[str]) -> None:
        """Do nothing: the attempt's end releases its objects."""

    def check_kept(self, connection: Connection, sha256: str) -> None:
        """Raise StorageFailed if the content is gone, or about to go."""
        if connection.execute(_kept(sha256)).first() is None:
            raise StorageFailed("The file was removed meanwhile: upload it again.")

    def open(self, sha256: str) -> ObjectContent:
        """Return a content; raises NotFound when there is none. Asks the database only."""
        with self._database.read() as connection:
            row = connection.execute(_kept(sha256)).first()
        if row is None:
            raise NotFound("The artifact's file is gone.")
        return ObjectContent(self._store, row.name, sha256, row.size)

    def read(self, sha256: str) -> bytes:
        """Return all of a small content; see ArtifactFiles.read."""
        content = self.open(sha256)
        try:
            return content.head(content.size)
        except Damaged as error:
            raise Damaged(f"{error.detail} Upload it again (PUT /files/{sha256}).") from error

    def probe(self) -> None:
        """Write an empty object. Raises StoreUnreachable."""
        with _store_errors():
            obstore.put(self._probed, PROBE, b"", use_multipart=False)

    def remove(self, sha256s: Iterable[str], database: Database) -> list[str]:
        """Remove the contents that nothing refers to and no attempt holds; returns the removed ones. What the store
        does not delete now, remove_unreferenced deletes later."""
        removed: set[str] = set()
        if self._clock() < self._remove_after:
            return []
        try:
            for batch in batches(sorted(set(sha256s))):
                removed |= self._remove(_object.sha256.in_(batch) & _removable(utc_now()), database)
        except StoreUnreachable as error:
            self._remove_after = self._clock() + PAUSE_S
            logger.warning("removed files stay on the object store for now: %s", error)
        return sorted(removed)

    def _remove(self, which: ColumnElement[bool], database: Database) -> set[str]:
        removed: set[str] = set()
        while True:
            with database.read() as connection:  # nearly always there are none
                names = list(connection.execute(select(_object.name).where(which).limit(BATCH)).scalars())
            if not names:
                return removed
            with database.write() as connection:
                mark = update(tables.stored_object).where(_object.name.in_(names), which).values(removing=True)
                marked = connection.execute(mark.returning(_object.name, _object.sha256)).all()
            if not self.may_remove(database):
                return removed
            gone = [row.name for row in marked]
            self._delete(gone)
            with database.write() as connection:
                done = _object.name.in_(gone) & _object.removing
                connection.execute(delete(tables.stored_object).where(done))
            removed |= {row.sha256 for row in marked if row.sha256 is not None}

    def _delete(self, names: list[str]) -> None:
        with _store_errors():
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:  # some stores say so, and leave the others
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def remove_unreferenced(self, database: Database, older_than_s: float) -> list[str]:
        """Remove and return contents that nothing refers to and no attempt holds; uploads without an attempt must be
        older than `older_than_s` seconds. Once a day, remove the objects without a row, too."""
        age = timedelta(seconds=older_than_s)
        removed = self._remove(_removable(utc_now() - age), database)
        if self._clock() >= self._list_after and self.may_remove(database):
            # An object's row is there before it: these arrived after the row's removal.
            for strays in self._strays(database, self._now() - age):
                logger.info("%d objects without a row are deleted", len(strays))
                self._delete(strays)
            self._list_after = self._clock() + LIST_EVERY_S
        return sorted(removed)

    def _strays(self, database: Database, before: datetime | None = None) -> Iterator[list[str]]:
        """Yield the objects without a row, some at a time; those from before a time of the store's clock."""
        with _store_errors():
            for page in obstore.list(self._store, chunk_size=BATCH):
                old = [meta for meta in page if before is None or meta["last_modified"] < before]
                names = [meta["path"] for meta in old if meta["path"] not in (PROBE, NOTE)]
                with database.read() as connection:
                    known = set(connection.execute(select(_object.name).where(_object.name.in_(names))).scalars())
                if strays := [name for name in names if name not in known]:
                    yield strays

    def _now(self) -> datetime:
        """Return the time on the store's clock."""
        self.probe()
        with _store_errors():
            return obstore.head(self._store, PROBE)["last_modified"]

    def __str__(self) -> str:
        return self.url

    def owner_for(self, database: Database) -> Owner:
        return owner_of(database)

    def read_note(self) -> bytes | None:
        try:
            with _store_errors(reading=True):
                return bytes(obstore.get(self._store, NOTE).bytes())
        except NotFound:
            return None

    def write_note(self, content: bytes) -> None:
        with _store_errors():
            obstore.put(self._store, NOTE, content, use_multipart=False)

    def has_unknown(self, database: Database) -> bool:
        return next(self._strays(database), None) is not None


@dataclass(frozen=True)
class Copied:
    """The numbers of files: `lost` ones are not in the folder, or damaged or unreadable there."""

    copied: int
    present: int
    lost: int


def copy_files(folder: ArtifactFiles, store: ObjectFiles, database: Database) -> Copied:
    """Copy each file that a row refers to and the store does not have; the folder stays as it is.

    Others may use the database meanwhile. A repeated call copies only what has come since. Raises StoreUnreachable.
    """
    wanted: set[str] = set()
    with database.read() as connection:
        for column in (tables.artifact.c.sha256, tables.code_file.c.sha256):
            wanted.update(connection.execute(select(column).distinct()).scalars())
    copied = present = lost = 0
    for sha256 in sorted(wanted):
        try:
            store.open(sha256)
        except NotFound:
            pass
        else:
            present += 1
            continue
        try:  # nothing refers to a damaged file that is stored now, so it is removed
            is_whole = store.put(folder.open_path(sha256))[0] == sha256
        except (NotFound, OSError):
            is_whole = False
        copied, lost = copied + is_whole, lost + (not is_whole)
    return Copied(copied, present, lost)


def _kept(sha256: str) -> Any:
    query = select(_object.name, _object.size, _object.created_at).where(_object.sha256 == sha256, ~_object.removing)
    return query.order_by(_object.created_at.desc()).limit(1)


def _check_runs(connection: Connection, claim: Claim | None) -> None:
    if claim is None:
        return
    held = select(_attempt.id).where(
        _attempt.id == claim.attempt_id, _attempt.token == claim.token, _attempt.state == literal_column("'running'")
    )
    if connection.execute(held).first() is None:
        raise LeaseLost(f"Attempt {claim.attempt} of job {claim.job_id} is no longer this worker's.")


def _open(url: str, request_s: int, retries: int) -> S3Store:
    prefix = OBJECT_STORES[urlsplit(url).scheme]
    allows_http = os.environ.get(f"{prefix}ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    seconds = f"{request_s}s"
    try:
        opened = from_url(
            url,
            client_options={"timeout": seconds, "connect_timeout": f"{PROBE_S}s", "allow_http": allows_http},
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=request_s)},
        )
    except (BaseError, ValueError) as error:
        raise CannotRunHere(f"FLOPWATCH_ARTIFACTS_URL cannot be used: {_words(error)}. See {prefix}….") from None
    return cast("S3Store", opened)  # the others have the same functions


def _parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the requests for the bytes from `start` to before `stop`."""
    for begin in range(start, stop, PART_BYTES):
        yield begin, min(begin + PART_BYTES, stop)


def _check_digest(sha256: str, actual: str, name: str) -> None:
    if actual != sha256:
        raise Damaged(f"The object {name} is not what was stored: its SHA-256 is {actual}, and was {sha256}.")


@contextmanager
def _store_errors(*, reading: bool = False) -> Iterator[None]:
    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError) as error:
        if reading and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            raise NotFound("The artifact's file is gone.") from None
        # The error as its cause would show the request.
        raise StoreUnreachable(f"{_words(error)}.") from None


def _words(error: Exception) -> str:
    """Return the first line of an error of obstore's, without queries, which may be signed, and without markup."""
    first = str(error).partition("\n")[0]
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    said = re.sub(r"\?\S*", "", first.partition(": <")[0]).rstrip(" .") + (f" ({code[1]})" if code else "")
    # The cloud's address for machines in it, asked where the environment has no credentials.
    return said + "; no credentials are set, such as AWS_ACCESS_KEY_ID" * ("169.254.169.254" in said)
