"""The database: consistent reads, exclusive writes, and notification of changes. Only this module opens connections.

The statements of the other modules are plain SQLAlchemy; what is specific to an engine is in its module: sqlite.py,
where each method of a backend is described, and postgresql.py.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from app.errors import CannotRunHere, DatabaseBusy, DatabaseFailed
from app.settings import Settings
from app.store.database import migrating
from app.store.database.moved import refuse_elsewhere, refuse_moved
from app.store.database.private import prepare_data_folder

if TYPE_CHECKING:
    from app.store.database.postgresql import PostgreSQL, Snapshots
    from app.store.database.sqlite import DataVersion, SQLite

MIGRATION_TIMEOUT_S = 60.0
CONNECTIONS = 20
"""Most connections of a process to a database server, unless it asks for fewer."""


Snapshot = Connection
"""A read transaction, for callers that hold no SQL: they pass it to the functions of app.store.reading."""


class Database:
    """One database. All threads of a process may share it; a forked process must not use it.

    url: SQLAlchemy's; `busy_timeout_s`: how long a write waits for other writers before DatabaseBusy; `connections`:
    the most that are opened to a database server.
    """

    def __init__(self, url: str | URL, *, busy_timeout_s: float = 5.0, connections: int = CONNECTIONS) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise CannotRunHere("FLOPWATCH_DATABASE_URL is not a database URL.") from error
        _refuse_after_fork(parsed.render_as_string())
        self.url = parsed.render_as_string()
        self.backend = _backend(parsed, busy_timeout_s, connections)
        self._reader = self.backend.engine
        self._writer = self.backend.engine.execution_options(begin="IMMEDIATE")
        self._watches: weakref.WeakSet[ChangeWatch] = weakref.WeakSet()
        self._busy_since: float | None = None
        """When the first write was refused as busy (time.monotonic); None once one has begun since."""
        _open_databases.add(self)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Read one consistent snapshot, from the first statement on; the transaction is rolled back on leaving."""
        with self._translated():
            connection = self._reader.connect()
            try:
                yield connection
            finally:
                with suppress(DBAPIError):  # cut since; what was read is whole, and the pool drops the connection
                    connection.close()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Begin the only write transaction of the host; it is committed on leaving and rolled back on an exception.

        Raises DatabaseBusy when other writers took too long, DiskFull when the disk is full; reads still work.
        """
        with self._noting_busy(), self._translated(), self.backend.write_lock(), self._writer.begin() as connection:
            self._busy_since = None
            yield connection

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

    def prepare(self) -> None:
        """Make what the database needs before it is opened. Raises CannotRunHere when it cannot be used."""
        with self._translated():
            self.backend.prepare()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        _refuse_after_fork(self.url)
        try:
            yield
        except NoConnectionFree as error:
            raise DatabaseBusy("All connections of this process to the database are in use; try again.") from error
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
        """Make a write that changes no data, to find out whether writing works: it raises the same errors, DatabaseBusy
        after `timeout_s`, by default that of any write."""
        with self._noting_busy(), self._translated():
            self.backend.probe(timeout_s)
            self._busy_since = None

    def busy_s(self) -> float:
        """Return for how many seconds all writes of this process were refused as busy; 0 if the last one began."""
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

    def checkpoint(self) -> None:
        """Truncate the write-ahead log, as far as readers allow."""
        with self._translated():
            self.backend.checkpoint()

    def backup(self, target: Path) -> None:
        """Write a consistent copy of the database into the new file `target`, while others continue to write. Raises
        OSError when that cannot be made, and CannotRunHere when there is no database yet, or when it has moved: the
        copy would lack what came later."""
        self.backend.refuse_missing()
        _refuse_moved(self)
        with self._translated():
            self.backend.backup(target)

    def close(self) -> None:
        for watch in list(self._watches):
            watch.close()
        self.backend.close()
        _open_databases.discard(self)


class ChangeWatch:
    """Tells whether any process committed since the last call; cheap enough for 20 calls a second."""

    def __init__(self, counter: DataVersion | Snapshots, driver_error: type[Exception]) -> None:
        self._counter = counter
        self._driver_error = driver_error
        self._last: object = None
        self._look_after = -math.inf

    def changed(self) -> bool:
        """Return True on the first call, if any process committed since the last look, or if the database cannot be
        read. A server is looked at a few times a second, however often this is called."""
        now = time.monotonic()
        if now < self._look_after:
            return False
        try:
            value = self._counter.value()
        except (self._driver_error, SQLAlchemyError):
            return True  # the caller then reads, and meets the error there
        self._look_after = now + self._counter.period_s
        changed, self._last = value != self._last, value
        return changed

    def close(self) -> None:
        self._counter.close()


def open_database(settings: Settings, connections: int = CONNECTIONS) -> Database:
    """Open the database of `settings`; make or migrate it as needed. Raises CannotRunHere (NetworkFileSystem,
    DatabaseNewer) when it cannot be used or has moved, and DatabaseGone when its server cannot be reached."""
    refuse_elsewhere(settings)
    prepare_data_folder(settings.data_dir)
    database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s, connections=connections)
    try:
        database.prepare()
        database.migrate()
        _refuse_moved(database)
    except BaseException:
        database.close()
        raise
    return database


def open_existing(settings: Settings, *, may_have_moved: bool = False) -> Database:
    """Open the database of `settings`, neither making nor migrating it. Raises CannotRunHere unless it exists with this
    version's schema, when it has moved (unless it may have), or when the data folder is another user's, whose server
    could not open the files that this process would make."""
    refuse_elsewhere(settings)
    database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s)
    try:
        database.backend.refuse_missing()
        prepare_data_folder(settings.data_dir)
        _refuse_older(database)
        if not may_have_moved:
            _refuse_moved(database)
    except BaseException:
        database.close()
        raise
    return database


def is_missing(settings: Settings) -> bool:
    """Return True if there is no database of `settings` yet, without making one; a server's may be empty."""
    database = Database(settings.resolved_database_url)
    try:
        database.backend.refuse_missing()
    except CannotRunHere:
        return True
    finally:
        database.close()
    return False


def _refuse_older(database: Database) -> None:
    with database.read() as connection:
        if not migrating.is_current(connection):
            raise CannotRunHere("An older version wrote the database, or none: start the server once to migrate it.")


def _refuse_moved(database: Database) -> None:
    with database.read() as connection:
        refuse_moved(connection, database.backend.place)


def _backend(url: URL, busy_timeout_s: float, connections: int) -> SQLite | PostgreSQL:
    # Each imports its driver's dialect only where it is used.
    name = url.get_backend_name()
    if name == "sqlite":
        from app.store.database.sqlite import SQLite

        return SQLite(url, busy_timeout_s)
    if name == "postgresql":
        from app.store.database.postgresql import PostgreSQL

        return PostgreSQL(url, busy_timeout_s, connections)
    raise CannotRunHere(f"The database {name!r} is not supported; there is sqlite, and postgresql+psycopg.")


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_inherited: set[str] = set()
"""URLs that were open in the parent when this process was forked."""


def _refuse_after_fork(url: str) -> None:
    # SQLite keeps track of its file locks per process, in memory that a fork copies but without the locks themselves:
    # a child would believe that it holds what only its parent does. Not even a new connection is safe there.
    if url in _inherited:
        raise CannotRunHere(
            "This process was forked while the database was open, which its connections do not survive: "
            "start the process with exec (subprocess, or multiprocessing's spawn) and open the database there."
        )


def _after_fork_in_child() -> None:
    for database in list(_open_databases):
        _inherited.add(database.url)
        database.backend.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
