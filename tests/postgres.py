"""A PostgreSQL server of this test process's own, which stores nothing for good, and databases on it.

PostgreSQL refuses to run as root: then another user runs it. Where it is not installed, tests that need it are skipped.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from tools.waiting import wait_until

USERS = ("postgres", "nobody")
PR_SET_PDEATHSIG = 1
SOCKET = ".s.PGSQL.5432"
END_OTHERS = """
    SET lock_timeout = '5s';
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid != pg_backend_pid()
"""
SCHEMA = """
    SELECT 'tables and indexes', count(*), max(xmin::text::bigint)::text FROM pg_class
    UNION ALL SELECT 'columns', count(*), max(xmin::text::bigint)::text FROM pg_attribute
    UNION ALL SELECT 'version', 1, version_num FROM alembic_version
"""
"""Differs after any change of the schema: how many there are of each, and the last transaction that changed one. Their
definitions would say the same, and take longer than all else between two tests."""
QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "shared_buffers=32MB")
"""Nobody pulls this host's plug in a test."""


@functools.cache
def programs() -> Path | None:
    """The folder of PostgreSQL's programs; None where it is not installed."""
    found = shutil.which("postgres")
    installed = [Path(found).parent] if found else []
    installed += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    return next((folder for folder in reversed(installed) if (folder / "initdb").exists()), None)


@dataclass
class Server:
    """A running server; its databases are reached through a socket in `folder`."""

    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _free: list[str] = field(default_factory=list)
    """Databases that are empty and migrated."""

    def url(self, database: str) -> URL:
        return URL.create("postgresql+psycopg", "flopwatch", database=database, query={"host": str(self.folder)})

    def connected(self, database: str) -> Any:
        """A connection that commits each statement; it takes longer than most statements."""
        import psycopg

        return psycopg.connect(host=str(self.folder), user="flopwatch", dbname=database, autocommit=True)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        with self.connected(database) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self) -> Iterator[URL]:
        """An empty, migrated database, which an earlier test may have had: to copy one takes longer than most tests."""
        name = self._free.pop() if self._free else self.copy()
        yield self.url(name)
        try:
            is_as_new = self._emptied(name)
        except Exception:  # noqa: BLE001 - whatever the test did to it
            is_as_new = False
        if is_as_new:
            self._free.append(name)
        else:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def copy(self) -> str:
        """Make a migrated database; returns its name."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {self.migrated} STRATEGY file_copy")
        return name

    def _emptied(self, name: str) -> bool:
        """Delete all rows; returns False if the test has changed the schema."""
        from app.store import tables

        names = [table.name for table in reversed(tables.job.metadata.sorted_tables)]
        restart = "SELECT setval(seqrelid, 1, false) FROM pg_sequence"
        with self.connected(name) as connection:
            connection.execute("; ".join([END_OTHERS, *(f"DELETE FROM {table}" for table in names), restart]).encode())
            return bool(connection.execute(SCHEMA.encode()).fetchall() == self._schema)

    @functools.cached_property
    def _schema(self) -> list[Any]:
        return self.execute(SCHEMA, self.migrated)

    @functools.cached_property
    def migrated(self) -> str:
        """The name of a migrated, empty database, to be copied."""
        from app.store.database.engine import Database

        self.execute("CREATE DATABASE migrated TEMPLATE template0")
        database = Database(self.url("migrated"))
        database.prepare()
        database.migrate()
        database.close()
        return "migrated"


@contextmanager
def running_server(*settings: str) -> Iterator[Server]:
    """Start a server with further settings; skip the test where PostgreSQL is not installed.

    It listens to no address unless the settings say so, and believes its whole network.
    """
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL is not installed here (Debian's package postgresql)")
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory(prefix="flopwatch-postgres-") as root:
        data, user = Path(root) / "data", _user()
        if user is not None:
            os.chown(root, user.pw_uid, user.pw_gid)
        made: list[Any] = [
            folder / "initdb",
            "-D",
            data,
            "-A",
            "trust",
            "-U",
            "flopwatch",
            "-N",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run(made, check=True, capture_output=True, cwd="/", **_as(user))
        with (data / "pg_hba.conf").open("a") as access:
            access.write("host all all samenet trust\n")
        listening = ("listen_addresses=", f"unix_socket_directories={root}")
        chosen = [word for setting in (*listening, *QUICK, *settings) for word in ("-c", setting)]
        with (Path(root) / "log").open("wb") as log:
            command: list[Any] = [folder / "postgres", "-D", data, *chosen]
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stderr=log, preexec_fn=_end_with_parent, **_as(user)
            )
        server = Server(Path(root))
        try:
            wait_until(lambda: _answers(server, process), what="PostgreSQL", poll_s=0.01)
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # which ends its clients' connections, too
            process.wait(30)


def _answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    from psycopg import OperationalError

    assert process.poll() is None, (server.folder / "log").read_text()
    try:
        return bool(server.execute("SELECT 1"))
    except OperationalError:
        return False


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _user() -> Any:
    """The user who runs the server; None: this one."""
    if os.geteuid() != 0:
        return None
    for name in USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


def _as(user: Any) -> dict[str, Any]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class Proxy:
    """Passes connections on to a server, through a socket in `folder`.

    It cuts the connection that commits next, once `when` is set: "before" the COMMIT reaches the server, or "after".
    """

    def __init__(self, server: Path, folder: Path) -> None:
        self.when: str | None = None
        self._server = str(server / SOCKET)
        self._opened = contextlib.ExitStack()
        self._ends: list[socket.socket] = []
        self._listening = self._opened.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(str(folder / SOCKET))
        self._listening.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._opened.enter_context(self._listening.accept()[0])
                server = self._opened.enter_context(socket.socket(socket.AF_UNIX))
                server.connect(self._server)
                self._ends += (client, server)
                for ends in ((client, server, True), (server, client, False)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, of_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if of_client and self.when is not None and b"COMMIT" in data:
                    committed, self.when = self.when == "after", None
                    source.shutdown(socket.SHUT_RDWR)  # the client hears nothing more
                    if committed:
                        target.sendall(data)
                    break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End all connections."""
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._opened.close()
