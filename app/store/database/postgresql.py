"""PostgreSQL: connections, the lock that keeps writes apart, what it stores otherwise than SQLite, and its errors.

All code that depends on PostgreSQL is here, beside the types and expressions in app/store/column_types.py.
Everything that SQLite takes is taken here as well, so that the rest of the store need not
know the engine: integers have 64 bits, texts are ordered by their code points, `contains` ignores the case of letters,
NUL and lone surrogates in texts become U+FFFD, and NaN is null.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Integer, create_engine
from sqlalchemy import event as events
from sqlalchemy.dialects.postgresql.base import PGDDLCompiler, PGTypeCompiler
from sqlalchemy.dialects.postgresql.psycopg import PGCompiler_psycopg
from sqlalchemy.exc import DBAPIError

from app.errors import CannotRunHere, DatabaseBusy, DatabaseGone, DiskFull, FlopwatchError, StorageFailed
from app.store.database.locking import TurnLock, hold
from flopwatch.text.times import set_clock

OLDEST = 13
"""The first version with pg_current_snapshot()."""
WRITERS = 0x666C6F7077617463
"""Key of the advisory lock that every write transaction takes first: "flopwatc" in ASCII."""
LOOK_S = 0.25
"""Seconds between two looks for changes: each is a statement, on every host."""
WRITER_IDLE_S, READER_IDLE_S = 15, 300
"""Seconds after which the server ends a transaction whose process has stopped, or whose network is cut. A writer keeps
all others from writing meanwhile."""
CLOCK_S = 3600
"""Seconds after which a connection is replaced: a new one asks for the server's time, since clocks drift."""
CONNECT: dict[str, Any] = {
    "autocommit": True,  # the `begin` event begins transactions
    "prepare_threshold": None,  # behind pgbouncer the next statement may reach another session
    "application_name": "flopwatch",
    "client_encoding": "utf8",
    "connect_timeout": 5,
    # A host that is gone without a word is noticed after some 20 seconds.
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}

BUSY = ("55P03", "57014", "40P01", "40001", "53300", "25P03")
"""lock_not_available, query_canceled, deadlock, serialization, too_many_connections, idle_in_transaction timeout"""
FULL = ("53100",)
FAILED = ("58", "XX", "53", "25006")
"""System errors, damage, lack of resources, read-only: after BUSY and FULL."""
GONE = ("08", "57P", "28", "3D")
"""No connection, the server stops or starts, it refuses the user, it has no such database."""


def storable(text: str) -> str:
    """Return the text with U+FFFD for what PostgreSQL keeps in no text: NUL, and halves of surrogate pairs."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\N{REPLACEMENT CHARACTER}")


class PostgreSQL:
    """One PostgreSQL database, as Database needs it; `connections` is the most that this process opens."""

    def __init__(self, url: URL, busy_timeout_s: float, connections: int) -> None:
        self._busy_timeout_s = busy_timeout_s
        self._turns = _Turns()
        try:
            self.engine = self._create_engine(url.set(drivername="postgresql+psycopg"), connections)
        except ModuleNotFoundError as error:
            raise CannotRunHere("There is no driver for PostgreSQL: pip install 'flopwatch[postgresql]'.") from error

    def _create_engine(self, url: URL, connections: int) -> Engine:
        engine = create_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=self._busy_timeout_s,
            pool_pre_ping=True,  # the server may have been restarted
            pool_use_lifo=True,
            pool_recycle=CLOCK_S,
            use_native_hstore=False,
            connect_args={name: value for name, value in CONNECT.items() if name not in url.query},
        )
        dialect: Any = engine.dialect
        dialect.statement_compiler, dialect.ddl_compiler = _Compiler, _DDL
        dialect.type_compiler_instance = dialect.type_compiler = _Types(dialect)
        events.listen(engine, "connect", _set_up)
        events.listen(engine, "begin", self._begin)
        events.listen(engine, "after_cursor_execute", _end_pipeline)
        return engine

    def _begin(self, connection: Connection) -> None:
        if connection.get_execution_options().get("begin") == "IMMEDIATE":
            left_ms = max(1, round((self._turns.deadline - time.monotonic()) * 1000))
            limits = f"{_idle(WRITER_IDLE_S)}; SET LOCAL lock_timeout = {left_ms}"
            statements = f"BEGIN; {limits}; SELECT pg_advisory_xact_lock({WRITERS})"
        else:
            statements = f"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_idle(READER_IDLE_S)}"
        # Several statements in one message, which parameters, even none, would make impossible.
        connection.exec_driver_sql(statements, execution_options={"no_parameters": True}).close()

    @property
    def place(self) -> str:
        url = self.engine.url
        return f"{url.database} on {url.host or url.query.get('host') or 'this host'}"

    def identity(self, connection: Connection) -> str:
        """Return the number that initdb gave to the server's data, and the database's number there."""
        query = "SELECT system_identifier, oid FROM pg_control_system(), pg_database WHERE datname = current_database()"
        server, database = connection.exec_driver_sql(query).one()
        return f"postgresql {server} {database}"

    @property
    def size(self) -> int:
        with self.engine.connect() as connection:
            size: int = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
        return size

    def prepare(self) -> None:
        with self.engine.connect() as connection:
            encoding: str = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one()) // 10_000
        if version < OLDEST:
            raise CannotRunHere(f"The database {self.place} is PostgreSQL {version}; at least {OLDEST} is needed.")
        if encoding != "UTF8":
            raise CannotRunHere(
                f"The database {self.place} has the encoding {encoding}, which lacks most letters: "
                "make one with CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'."
            )

    def refuse_missing(self) -> None:
        """Do nothing: the first connection says so."""

    @contextmanager
    def write_lock(self, timeout_s: float | None = None) -> Iterator[None]:
        """Let one thread of this process at a time ask for the lock, so that waiting writers hold one connection."""
        with hold(self._turns, self._busy_timeout_s if timeout_s is None else timeout_s):
            yield

    @contextmanager
    def _writing(self, timeout_s: float | None) -> Iterator[Connection]:
        with self.write_lock(timeout_s), self.engine.execution_options(begin="IMMEDIATE").begin() as connection:
            yield connection

    def migration(self, timeout_s: float) -> Any:
        return self._writing(timeout_s)

    def probe(self, timeout_s: float | None) -> None:
        with self._writing(timeout_s) as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")

    def change_counter(self) -> Snapshots:
        return Snapshots(self.engine)

    def translate(self, error: Exception) -> FlopwatchError | None:
        original = error.orig if isinstance(error, DBAPIError) else error
        state = getattr(original, "sqlstate", None)
        if state is None:
            # The driver's own errors have no code: no connection, or one that broke off.
            if not isinstance(original, self._driver.OperationalError | self._driver.InterfaceError):
                return None
            state = "08000"
        if state in BUSY:
            return DatabaseBusy(f"The database was locked for longer than {self._busy_timeout_s:g} s, or is too busy.")
        if state in FULL:
            return DiskFull(f"The database {self.place} could not grow: {original}.")
        if state.startswith(FAILED):
            return StorageFailed(f"The database {self.place} cannot be used: {original}. See the log of its server.")
        if state.startswith(GONE):
            return DatabaseGone(f"The database {self.place} cannot be reached: {original}")
        return None

    @property
    def _driver(self) -> Any:
        return self.engine.dialect.dbapi

    def spare_pages(self, _connection: Connection) -> int:
        return 0  # autovacuum makes them free for new rows

    def cut_pages(self, _connection: Connection) -> int:
        return 0

    def checkpoint(self) -> None:
        """Do nothing: PostgreSQL manages its own log."""

    def backup(self, target: Path) -> None:
        raise CannotRunHere(
            f"The database is PostgreSQL, whose own program makes its backups: pg_dump -Fc -f {target} "
            "with the database's URL."
        )

    def close(self) -> None:
        self.engine.dispose()

    def forget(self) -> None:
        self.engine.dispose(close=False)
        self._turns = _Turns()


def _end_pipeline(_connection: Any, cursor: Any, _sql: Any, _values: Any, _context: Any, executemany: bool) -> None:
    """After a statement with many rows psycopg sends a Flush, at which the server stops its clock of idle
    transactions; an empty statement starts it again."""
    if executemany:
        cursor.connection.execute(";")


def _idle(seconds: int) -> str:
    return f"SET LOCAL idle_in_transaction_session_timeout = '{seconds}s'"


class _Turns:
    """The turns of this process's writers; `deadline` is that of the one whose turn it is (time.monotonic)."""

    def __init__(self) -> None:
        self._turn = TurnLock()
        self.deadline = 0.0

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout_s):
            raise DatabaseBusy(f"Other threads have been writing for longer than {timeout_s:g} s.")
        try:
            self.deadline = deadline
            yield
        finally:
            self._turn.release()


class Snapshots:
    """The server's present snapshot, which every transaction that wrote changes at the moment when others see it.

    The position in the write-ahead log, which also moves with each write, moves before others see the commit: who
    looks in between sees nothing, and the position never moves again for it.
    """

    period_s = LOOK_S

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def value(self) -> str:
        pooled = self._engine.raw_connection()  # it commits each statement: no transaction stays open
        try:
            cursor = pooled.cursor()
            cursor.execute("SELECT pg_current_snapshot()::text")
            (snapshot,) = cursor.fetchall()[0]
            return str(snapshot)
        finally:
            pooled.close()

    def close(self) -> None:
        """Do nothing: the connections are the engine's."""


class _Compiler(PGCompiler_psycopg):
    """`contains` ignores the case of letters, as SQLite's LIKE does. Integers are sent as large as they are."""

    def render_bind_cast(self, type_: Any, dbapi_type: Any, sqltext: str) -> str:
        if isinstance(dbapi_type, Integer):
            return sqltext
        return str(super().render_bind_cast(type_, dbapi_type, sqltext))  # type: ignore[no-untyped-call]

    def visit_contains_op_binary(self, binary: Any, operator: Any, **kw: Any) -> str:
        return str(self.visit_icontains_op_binary(binary, operator, **kw))  # type: ignore[no-untyped-call]


class _Types(PGTypeCompiler):
    """Integers have 64 bits, as SQLite's have."""

    def visit_INTEGER(self, type_: Any, **kw: Any) -> str:  # noqa: N802 - SQLAlchemy's name
        return "BIGINT"


class _DDL(PGDDLCompiler):
    """Texts are ordered by their code points, as SQLite's are, whatever the database's locale."""

    def get_column_specification(self, column: Any, **kw: Any) -> str:
        specification = str(super().get_column_specification(column, **kw))  # type: ignore[no-untyped-call]
        is_text = self.dialect.type_compiler_instance.process(column.type).startswith(("VARCHAR", "TEXT"))
        return f'{specification} COLLATE "C"' if is_text else specification


def _set_up(connection: Any, _record: object) -> None:
    from psycopg import DataError
    from psycopg.types.numeric import FloatDumper
    from psycopg.types.string import StrDumperUnknown

    class Number(FloatDumper):
        def dump(self, obj: float) -> Any:
            return None if obj != obj else super().dump(obj)

    class Text(StrDumperUnknown):
        def dump(self, obj: str) -> Any:
            try:
                return super().dump(obj)
            except (UnicodeEncodeError, DataError):
                return super().dump(storable(obj))

    connection.adapters.register_dumper(float, Number)
    connection.adapters.register_dumper(str, Text)
    set_clock(connection.execute("SELECT clock_timestamp()").fetchone()[0])
