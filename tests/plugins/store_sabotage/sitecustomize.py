"""Takes protecting mechanisms out of a process of the service, for controls: without them the tests must fail.

Python imports this module at start where its folder is on the path. $SABOTAGE names what to take out, separated by
commas; the product knows nothing of it.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event

from app.api.changes import Changes
from app.store.database.engine import Database
from app.store.database.locking import WriteLock
from app.store.database.sqlite import SQLite
from app.store.files.artifacts import ArtifactFiles

FOR_EVER_S = 3600.0


def replace(owner: type, name: str, substitute: Callable[..., Any]) -> None:
    """Put `substitute` in a method's place."""
    setattr(owner, name, substitute)


def transaction() -> None:
    """Every statement of a write is a transaction of its own."""

    def commit(connection: Connection, *_statement: object) -> None:
        raw: Any = connection.connection.driver_connection
        raw.commit()

    @contextlib.contextmanager
    def write(self: Database) -> Iterator[Connection]:
        with self._translated(), self.backend.write_lock(), self._reader.begin() as connection:
            event.listen(connection, "before_cursor_execute", commit)
            yield connection

    replace(Database, "write", write)


def write_lock() -> None:
    """Writers do not wait for each other's file lock."""
    replace(SQLite, "write_lock", lambda *_arguments: contextlib.nullcontext())


def lock_deadline() -> None:
    """A write waits for the file lock as long as it takes."""
    original = WriteLock.hold
    replace(WriteLock, "hold", lambda self, _timeout_s: original(self, FOR_EVER_S))


def error_translation() -> None:
    """The database's errors reach the routes as the driver raises them."""
    replace(SQLite, "translate", lambda *_arguments: None)


def waking_of_streams() -> None:
    """A server that is told to stop says nothing to its streams."""
    replace(Changes, "stop", lambda _self: None)


def whole_artifacts() -> None:
    """Contents are copied to their names directly."""

    def put(self: ArtifactFiles, path: Path, _check: object = None, _claim: object = None) -> tuple[str, int]:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        target = self._path(sha256)
        with self._space_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            self._hold(sha256)
        return sha256, path.stat().st_size

    replace(ArtifactFiles, "put", put)
    replace(ArtifactFiles, "take", put)


MECHANISMS = {
    mechanism.__name__: mechanism
    for mechanism in (transaction, write_lock, lock_deadline, error_translation, waking_of_streams, whole_artifacts)
}

for name in filter(None, os.environ.get("SABOTAGE", "").split(",")):
    MECHANISMS[name]()

import light_warm_parent  # noqa: E402, F401 - it imports what is sabotaged above
