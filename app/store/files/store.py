"""What both stores of files share: a folder (artifacts.py) or an object store (objects.py) has the bytes of artifacts
and uploaded code."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from anyio.to_thread import run_sync
from sqlalchemy import Connection, select

from app.errors import Damaged
from app.store import tables

if TYPE_CHECKING:
    from app.store.files.artifacts import ArtifactFiles
    from app.store.files.objects import ObjectContent, ObjectFiles

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 8 << 20
"""A smaller file is read whole before it is sent."""
BATCH = 500
"""Number of contents that one transaction looks at."""

Check = Callable[[int], None]
"""Gets the size of a file in bytes, before it is read and once per chunk, and raises an error to have it left out."""


def accept(_size: int) -> None:
    """Accept every size."""


@dataclass(frozen=True)
class FolderContent:
    """A content in a folder."""

    path: Path
    sha256: str
    size: int

    def head(self, limit: int) -> bytes:
        """Return its first bytes, `limit` at most. Raises Damaged if these are all, and are not what was stored."""
        with self.path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) <= limit:
            self._check_digest(hashlib.sha256(content).hexdigest())
        return content[:limit]

    async def check(self, size: int) -> None:
        """Raise Damaged if it has not `size` bytes, or is small and not what was stored."""
        if self.size != size:
            raise Damaged(f"The file {self.sha256} is damaged: {self.size} bytes, expected {size}.")
        if size < SMALL_BYTES:
            await run_sync(self.head, SMALL_BYTES)

    async def stream(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` to before `stop`, as `ObjectContent.stream`."""
        digest, at = hashlib.sha256(), start
        # Closing it must await nothing: a client that disconnects cancels everything that its answer awaits.
        with contextlib.ExitStack() as opened:
            file = await run_sync(lambda: opened.enter_context(self.path.open("rb")))
            file.seek(start)
            while at < stop and (part := await run_sync(file.read, min(CHUNK_BYTES, stop - at))):
                at += len(part)
                digest.update(part)
                if (start, at) == (0, self.size):
                    self._check_digest(digest.hexdigest())
                yield part

    def _check_digest(self, actual: str) -> None:
        if actual != self.sha256:
            raise Damaged(f"The disk has changed the file {self.sha256}: its SHA-256 is {actual} now.")


Content: TypeAlias = "FolderContent | ObjectContent"
FileStore: TypeAlias = "ArtifactFiles | ObjectFiles"
"""The contents of one database, by their SHA-256. Threads and processes may share a store."""


def referenced(connection: Connection, sha256s: Sequence[str]) -> set[str]:
    """Return those of the contents that an artifact or an uploaded file refers to."""
    found: set[str] = set()
    for sha256 in (tables.artifact.c.sha256, tables.code_file.c.sha256):
        found.update(connection.execute(select(sha256).where(sha256.in_(sha256s)).distinct()).scalars())
    return found


def batches(contents: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut contents into parts that one transaction looks at."""
    for start in range(0, len(contents), BATCH):
        yield contents[start : start + BATCH]
