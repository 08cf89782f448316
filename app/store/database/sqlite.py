"""SQLite: chooses its library, sets up connections, keeps writes apart and translates errors.

All code that depends on SQLite is here, as postgresql.py has all that depends on PostgreSQL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any

from sqlalchemy import URL, Connection, Engine, FromClause, QueuePool, create_engine
from sqlalchemy import event as events
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import DBAPIError

from app.errors import CannotRunHere, DatabaseBusy, DatabaseGone, DiskFull, FlopwatchError, StorageFailed, is_no_space
from app.store.database.file_systems import refuse_network_file_system
from app.store.database.locking import WriteLock, hold
from app.store.database.private import create_private, make_files_private

SAFE_VERSION = (3, 51, 3)
"""Older versions can corrupt a WAL database that several processes write and checkpoint."""
WAL_LIMIT_BYTES = 64 << 20
"""Most bytes of the log's file that stay when the log starts over."""
FREE_FRACTION = 0.05
"""Fraction of the pages that stays free for new rows; without it the file would shrink and grow all the time."""
PAGES_AT_ONCE = 100
POOL_SIZE = 8

BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB = 5, 6, 8, 10, 11, 13, 14, 26
PROBE_BYTES = 1 << 20


@cache
def driver() -> ModuleType:
    """Return the DBAPI module: pysqlite3, which brings its own SQLite. Raises CannotRunHere if that is too old."""
    from pysqlite3 import dbapi2

    module: ModuleType = dbapi2
    if dbapi2.sqlite_version_info < SAFE_VERSION:
        raise CannotRunHere(
            f"pysqlite3 carries SQLite {dbapi2.sqlite_version}; at least {'.'.join(map(str, SAFE_VERSION))} is needed."
        )
    return module


class SQLite:
    """One SQLite database file, as Database needs it. A transaction of `engine` with the execution option `begin` =
    "IMMEDIATE" writes, inside `write_lock`; others read one snapshot."""

    def __init__(self, url: URL, busy_timeout_s: float) -> None:
        if not url.database or url.database == ":memory:":
            raise CannotRunHere("The database must be a file: server and workers share it.")
        self.path = Path(url.database).absolute()
        self._busy_timeout_s = busy_timeout_s
        self._lock = WriteLock(self.path.with_name(self.path.name + ".lock"))
        self._wal = self.path.with_name(self.path.name + "-wal")
        self._identity: tuple[int, int] | None = None
        self.engine = self._create_engine(url)

    def _create_engine(self, url: URL) -> Engine:
        engine = create_engine(
            url.set(database=str(self.path)),
            module=driver(),
            poolclass=QueuePool,
            pool_size=POOL_SIZE,
            max_overflow=-1,
            # The driver opens no transaction by itself: the `begin` event below does, and chooses its kind.
            connect_args={"isolation_level": None, "timeout": self._busy_timeout_s, "check_same_thread": False},
        )
        engine.dialect.statement_compiler = _Compiler
        events.listen(engine, "do_connect", lambda *_: self._check_file())
        events.listen(engine, "connect", self._set_up)
        events.listen(engine, "begin", _begin)
        return engine

    def _set_up(self, dbapi_connection: Any, _record: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(self._busy_timeout_s * 1000)}")
        if not _size(self.path):
            # Only an empty database takes it, and the next line writes. Elsewhere it would wait for the write lock.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        cursor.close()
        if self._identity is None:
            self._identity = _identity(self.path)

    @property
    def place(self) -> str:
        """Where the database is, for people."""
        return str(self.path)

    def identity(self, connection: Connection) -> str:
        """Return the file's number and path. A copy on its disk has another number; one on another disk may have the
        same, but seldom the path, too."""
        del connection  # what it reads, copies have, too
        return f"sqlite {self.path.stat().st_ino} {self.path.resolve()}"

    def refuse_missing(self) -> None:
        """Raise CannotRunHere when there is no file."""
        if not self.path.exists():
            raise CannotRunHere(f"There is no database {self.path}.")

    def prepare(self) -> None:
        """Make the folder and the file, which nobody else may open; refuse a network file system."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_network_file_system(self.path)
        try:
            create_private(self.path)  # SQLite gives its other files the same permissions
            make_files_private(self.path)
        except OSError as error:
            raise self._storage_error(error, is_full=is_no_space(error)) from error
        with suppress(OSError, DatabaseBusy):  # a reader does not need the lock; a writer will get the error
            self._lock.prepare()

    def _check_file(self) -> None:
        """Raise DatabaseGone when the path no longer leads to the file that this process has open. SQLite would
        continue to write to a file without a name, and closing the last connection would lose all of it."""
        try:
            there = _identity(self.path)
        except OSError as error:
            raise self._storage_error(error, is_full=False) from error
        if self._identity is not None and there != self._identity:
            raise DatabaseGone(
                f"{self.path} was removed or replaced while this process had it open, so nothing is written any more. "
                "Put the file back, or restart server and workers to use the one that is there."
            )

    @contextmanager
    def write_lock(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock that serialises writers, so that BEGIN IMMEDIATE meets no other writer."""
        with hold(self._lock, self._busy_timeout_s if timeout_s is None else timeout_s):
            self._check_file()
            yield

    def probe(self, timeout_s: float | None) -> None:
        """Rewrite a page with its present content, and find out whether the disk has room for more.

        Raises the same errors as a write; DatabaseBusy when other writers kept it waiting for `timeout_s` seconds.
        """
        timeout_s = self._busy_timeout_s if timeout_s is None else timeout_s
        self._check_file()
        if error := self._growth_error():
            raise self._storage_error(error, is_full=is_no_space(error))
        with self.write_lock(timeout_s), self._cursor_with_timeout(timeout_s) as cursor:
            (version,) = cursor.execute("PRAGMA user_version").fetchone()
            cursor.execute(f"PRAGMA user_version = {version}")  # a transaction of its own, of one page

    def checkpoint(self) -> None:
        """Move the log into the database file and truncate it, as far as readers allow."""
        with self._cursor_with_timeout(self._busy_timeout_s) as cursor:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def spare_pages(self, connection: Connection) -> int:
        """Return the number of free pages beyond the share that is kept for new rows."""
        free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
        total: int = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return max(0, int((free - total * FREE_FRACTION) / (1 - FREE_FRACTION)))

    def cut_pages(self, connection: Connection) -> int:
        """Move at most PAGES_AT_ONCE spare pages to the file's end and cut them off, in the connection's transaction.

        Returns their number. The file itself becomes shorter at the next checkpoint.
        """
        number = min(self.spare_pages(connection), PAGES_AT_ONCE)
        if not number:
            return 0
        raw = connection.connection.driver_connection
        assert raw is not None
        # Each row that is fetched cuts off one page; a database that was restored from SQL text has none to cut off.
        return len(raw.execute(f"PRAGMA incremental_vacuum({number})").fetchall())

    @property
    def size(self) -> int:
        """Return the size of the database's file in bytes."""
        return _size(self.path)

    @contextmanager
    def _cursor_with_timeout(self, wait_s: float) -> Iterator[Any]:
        """Yield a cursor outside transactions that waits `wait_s` seconds for locks of other programs."""
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
            try:
                yield cursor
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {round(self._busy_timeout_s * 1000)}")
        finally:
            connection.close()

    @contextmanager
    def migration(self, timeout_s: float) -> Iterator[Connection]:
        """Begin a write transaction with foreign keys off, as batch migrations need; check them before the commit."""
        with self.write_lock(timeout_s), self.engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.execute("PRAGMA foreign_keys = OFF")  # has no effect inside a transaction
            try:
                with connection.execution_options(begin="IMMEDIATE").begin():
                    yield connection
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                    if broken:
                        raise CannotRunHere(f"The migration broke {len(broken)} references: {broken[:5]}")
            finally:
                raw.execute("PRAGMA foreign_keys = ON")

    def backup(self, target: Path) -> None:
        """Write a consistent copy of the database into the new file `target`. If that fails, no file remains."""
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        source = self.engine.raw_connection()
        try:
            copy = driver().connect(str(target))
            try:
                source.driver_connection.backup(copy)  # type: ignore[union-attr]
            finally:
                copy.close()
        except BaseException:
            target.unlink()
            raise
        finally:
            source.close()

    def change_counter(self) -> DataVersion:
        """Return the counter that ChangeWatch polls."""
        return DataVersion(self.engine)

    def translate(self, error: Exception) -> FlopwatchError | None:
        """Return the project's error for an error of the driver, or None when there is none."""
        original = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(original, "sqlite_errorcode", None)
        if code is None:
            return None
        if code & 0xFF in (BUSY, LOCKED):
            return DatabaseBusy(f"The database was locked for longer than {self._busy_timeout_s:g} s.")
        if code & 0xFF == FULL:
            return self._storage_error(original, is_full=True)
        if code & 0xFF in (CORRUPT, NOTADB):  # a failing disk may also return wrong contents, or none
            return StorageFailed(f"{self.path} is damaged: {original}. The system's log may say more about its disk.")
        if code & 0xFF in (IOERR, READONLY, CANTOPEN):
            # SQLite reports a full disk, but not a quota or a size limit.
            growth_error = self._growth_error()
            return self._storage_error(original, is_full=growth_error is not None and is_no_space(growth_error))
        return None

    def _growth_error(self) -> OSError | None:
        """Return the error that keeps the log from growing; None when it can grow."""
        try:
            with TemporaryFile(dir=self.path.parent) as probe:
                os.posix_fallocate(probe.fileno(), _size(self._wal), PROBE_BYTES)
        except OSError as error:
            return error
        return None

    def _storage_error(self, error: object, *, is_full: bool) -> FlopwatchError:
        if is_full:
            return DiskFull(f"The database could not grow, its disk is full or a file-size limit is reached: {error}.")
        return StorageFailed(f"{self.path} cannot be used: {error}. The system's log may say more about its disk.")

    def close(self) -> None:
        self.engine.dispose()
        self._lock.close()

    def forget(self) -> None:
        """In a forked child: drop all connections without closing them; closing would drop the parent's locks."""
        _never_closed.append(self.engine.pool)
        self.engine.dispose(close=False)
        self._lock.forget()


_never_closed: list[object] = []
"""Pools that a fork copied. They are kept, because garbage collection would close their connections."""


class _Compiler(SQLiteCompiler):
    """SQLAlchemy's compiler, extended to write hints as INDEXED BY, for statements in which SQLite's planner chooses
    wrongly."""

    def get_from_hint_text(self, table: FromClause, text: str | None) -> str | None:
        return text


class DataVersion:
    """`PRAGMA data_version` on a connection of its own that does not write; each commit of another one changes it."""

    period_s = 0.0  # a look takes microseconds

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.raw_connection()
        self._connection.detach()
        self._cursor = self._connection.cursor()

    def value(self) -> int:
        return int(self._cursor.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self._connection.close()


def _begin(connection: Connection) -> None:
    # A read that turns into a write can fail at once with a snapshot error that no timeout covers, so a write begins as
    # one.
    mode = connection.get_execution_options().get("begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
