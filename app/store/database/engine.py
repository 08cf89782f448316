"""The database: consistent reads, exclusive writes, and notification of changes. Only this module opens connections.

The statements of the other modules are plain SQLAlchemy; everything specific to SQLite is in sqlite.py, and another
database would be another entry of BACKENDS.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from app.errors import CannotRunHere, DatabaseBusy, DatabaseFailed
from app.settings import Settings
from app.store.database import migrating
from app.store.database.private import prepare_data_folder
from app.store.database.sqlite import DataVersion, SQLite

BACKENDS = {"sqlite": SQLite}
MIGRATION_TIMEOUT_S = 60.0


Snapshot = Connection
"""A read transaction, for callers that hold no SQL: they pass it to the functions of app.store.reading."""


class Database:
    """One database. All threads of a process may share it; a forked process must not use it.

    url: SQLAlchemy's; `busy_timeout_s`: how long a write waits for other writers before DatabaseBusy.
    """

    def __init__(self, url: str | URL, *, busy_timeout_s: float = 5.0) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise CannotRunHere("FLOPWATCH_DATABASE_URL is not a database URL.") from error
        name = parsed.get_backend_name()
        if name not in BACKENDS:
            raise CannotRunHere(f"The database {name!r} is not supported; there is {', '.join(sorted(BACKENDS))}.")
        _refuse_after_fork(parsed.render_as_string())
        self.url = parsed.render_as_string()
        self.backend = BACKENDS[name](parsed, busy_timeout_s)
        self._reader = self.backend.engine
        self._writer = self.backend.engine.execution_options(begin="IMMEDIATE")
        self._watches: weakref.WeakSet[ChangeWatch] = weakref.WeakSet()
        self._busy_since: float | None = None
        """When the first write was refused as busy (time.monotonic); None once one has begun since."""
        _open_databases.add(self)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Read one consistent snapshot, from the first statement on; the transaction is rolled back on leaving."""
        with self._translated(), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Begin the only write transaction of the host; it is committed on leaving and rolled back on an exception.

        Raises DatabaseBusy when other writers took too long, DiskFull when the disk is full; reads still work.
        """
        with self._noting_busy(), self._translated(), self.backend.write_lock():
            with self._writer.begin() as connection:
                self._busy_since = None
                yield connection
            self.backend.after_write()

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """Begin a write transaction in which the schema may change."""
        with self._translated(), self.backend.migration(MIGRATION_TIMEOUT_S) as connection:
            yield connection

    def migrate(self) -> None:
        """Upgrade to the newest revision; raises DatabaseNewer for a revision of a newer Flopwatch."""
        with self.read() as connection:
            if migrating.is_current(connection):
                return
        with self.migration() as connection:
            if migrating.is_current(connection):  # another process was faster
                return
            migrating.upgrade(connection)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        _refuse_after_fork(self.url)
        try:
            yield
        except (DBAPIError, self._reader.dialect.dbapi.Error) as error:  # type: ignore[union-attr]
            cause = error.orig if isinstance(error, DBAPIError) else error
            unforeseen = DatabaseFailed(f"{type(cause).__name__}: {cause}")
            raise self.backend.translate(error) or unforeseen from error

    def watch(self) -> ChangeWatch:
        """Return a new watch on the commits of all processes; one thread may use it."""
        with self._translated():
            watch = ChangeWatch(self.backend.change_counter(), self._reader.dialect.dbapi.Error)  # type: ignore[union-attr]
        self._watches.add(watch)
        return watch

    def probe(self, timeout_s: float | None = None) -> None:
        """Make a write that changes no data, to find out whether writing works.

        Raises the same errors as a write. `timeout_s` is how long it waits for other writers before DatabaseBusy, by
        default as long as any write.
        """
        with self._noting_busy(), self._translated():
            self.backend.probe(timeout_s)
            self._busy_since = None

    def busy_s(self) -> float:
        """Return for how many seconds all writes of this process have been refused as busy; 0 if the last one could
        begin."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def _noting_busy(self) -> Iterator[None]:
        try:
            yield
        except DatabaseBusy:
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            raise

    def vacuum(self) -> None:
        """Rewrite the database, as small as possible; no other write begins meanwhile."""
        with self._translated():
            self.backend.vacuum(MIGRATION_TIMEOUT_S)

    def checkpoint(self) -> None:
        """Truncate the write-ahead log, as far as readers allow."""
        with self._translated():
            self.backend.checkpoint()

    def backup(self, target: Path) -> None:
        """Write a consistent copy of the database into the new file `target`, while others continue to write.

        Raises CannotRunHere when there is no database yet, and OSError when `target` cannot be made.
        """
        with self._translated():
            self.backend.backup(target)

    def close(self) -> None:
        """Close every connection."""
        for watch in list(self._watches):
            watch.close()
        self.backend.close()
        _open_databases.discard(self)


class ChangeWatch:
    """Tells whether any process committed since the last call; cheap enough for 20 calls a second."""

    def __init__(self, counter: DataVersion, driver_error: type[Exception]) -> None:
        self._counter = counter
        self._driver_error = driver_error
        self._last: int | None = None

    def changed(self) -> bool:
        """Return True on the first call, if any process committed since the last call, or if the database cannot be
        read."""
        try:
            value = self._counter.value()
        except self._driver_error:
            return True  # the caller then reads, and meets the error there
        changed, self._last = value != self._last, value
        return changed

    def close(self) -> None:
        self._counter.close()


def open_database(settings: Settings) -> Database:
    """Open the database of `settings`; make or migrate it as needed.

    Raises NetworkFileSystem, DatabaseNewer or another CannotRunHere when it cannot be used.
    """
    prepare_data_folder(settings.data_dir)
    database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s)
    try:
        database.backend.prepare()
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database


def open_existing(settings: Settings) -> Database:
    """Open the database of `settings`, which must exist and have this version's schema.

    Raises CannotRunHere when it is not, or when the data folder is another user's, whose server could not open
    the files that this process would make; the database is neither made nor migrated.
    """
    database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s)
    try:
        _refuse_missing(database)
        prepare_data_folder(settings.data_dir)
        _refuse_older(database)
    except BaseException:
        database.close()
        raise
    return database


def _refuse_missing(database: Database) -> None:
    if not database.backend.path.exists():
        raise CannotRunHere(f"There is no database {database.backend.path}.")


def _refuse_older(database: Database) -> None:
    with database.read() as connection:
        if not migrating.is_current(connection):
            raise CannotRunHere("An older version wrote the database: start the server once to migrate it.")


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_inherited: set[str] = set()
"""URLs that were open in the parent when this process was forked."""


def _refuse_after_fork(url: str) -> None:
    # SQLite keeps track of its file locks per process, in memory that a fork copies but without the locks themselves:
    # a child would believe that it holds what only its parent does. Not even a new connection is safe there.
    if url in _inherited:
        raise CannotRunHere(
            "This process was forked while the database was open, and SQLite does not survive that: "
            "start the process with exec (subprocess, or multiprocessing's spawn) and open the database there."
        )


def _after_fork_in_child() -> None:
    for database in list(_open_databases):
        _inherited.add(database.url)
        database.backend.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
