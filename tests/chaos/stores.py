"""Where a Flopwatch under chaos has its rows and files: here, or on two servers that the network can cut off."""

import contextlib
import hashlib
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.settings import Settings
from app.store.database.engine import open_database
from app.store.database.sqlite import driver
from app.store.files.opening import open_files
from tests.chaos.evidence import StoredFile, stored_files
from tests.object_stores import Bucket, Network, new_bucket, serving_objects
from tests.postgres import Server, running_server
from tools.waiting import wait_until

DURABLE = "synchronous_commit=on"
"""What was committed outlasts a kill of PostgreSQL's processes."""
JSON_EXTRACT = """CREATE FUNCTION json_extract(text, text) RETURNS text LANGUAGE sql
    AS $$ SELECT $1::json ->> substr($2, 3) $$"""
"""SQLite's function, for the questions that both engines are asked."""
SYSTEM_FAILED = ("57", "08")
"""SQLSTATE classes of errors that mean PostgreSQL itself: it was killed, and recovers."""


@dataclass
class Local:
    """SQLite and a folder."""

    data_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with which processes find them."""

    def ask(self, question: str) -> list[Any]:
        """Answer SQL from the database as it is now."""
        path = self.data_dir / "flopwatch.sqlite3"
        with closing(driver().connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)) as connection:
            rows: list[Any] = connection.execute(question).fetchall()
            return rows

    def files(self) -> dict[str, StoredFile]:
        """Return the contents of the store of files."""
        return stored_files(self.data_dir)

    def remove_unreferenced(self) -> None:
        """Remove the contents that belong to nothing, whatever their age, as the server does with those of an hour."""
        with closing(open_database(self._settings())) as database:
            open_files(self._settings(), database).remove_unreferenced(database, older_than_s=0.0)

    def _settings(self) -> Settings:
        return Settings(
            data_dir=self.data_dir,
            database_url=self.environment.get("FLOPWATCH_DATABASE_URL"),
            artifacts_url=self.environment.get("FLOPWATCH_ARTIFACTS_URL"),
        )


@dataclass
class Remote(Local):
    """PostgreSQL and an object store. This process reaches them by ways that no fault cuts."""

    postgres: Server = field(kw_only=True)
    database: str = field(kw_only=True)
    bucket: Bucket = field(kw_only=True)
    networks: Mapping[str, Network] = field(kw_only=True)
    """Between the service and each of the two, by the fault that cuts it."""

    def ask(self, question: str) -> list[Any]:
        if question.startswith("PRAGMA"):
            return []  # PostgreSQL keeps its references itself
        import psycopg

        def answer() -> list[Any] | None:
            try:
                return [self.postgres.execute(question, self.database)]
            except psycopg.OperationalError as error:
                if (error.sqlstate or "08")[:2] not in SYSTEM_FAILED:
                    raise
                return None

        rows: list[Any] = wait_until(answer, what="PostgreSQL")[0]
        return rows

    def kill(self, target: int) -> None:
        """Kill a process that serves a connection: PostgreSQL ends all others, and recovers."""
        backends = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname IS NOT NULL"
        found = [pid for (pid,) in self.ask(f"{backends} AND pid != pg_backend_pid() ORDER BY pid")]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[target % len(found)], signal.SIGKILL)

    def files(self) -> dict[str, StoredFile]:
        """Return what is stored, by its hash, and objects without a row by their names."""
        found = {}
        with closing(open_database(self._settings())) as database:
            files = open_files(self._settings(), database)
            for (sha256,) in self.ask("SELECT DISTINCT sha256 FROM stored_object WHERE sha256 IS NOT NULL"):
                content = files.read(sha256)
                found[sha256] = StoredFile(hashlib.sha256(content).hexdigest(), len(content))
            names = {name for (name,) in self.ask("SELECT name FROM stored_object")}
        strays = {name.rpartition("/")[2] for name in self.bucket.names()} - names
        return found | {name: StoredFile("without a row", 0) for name in strays}


@contextlib.contextmanager
def remote(data_dir: Path) -> Iterator[Remote]:
    """Start both servers, empty."""
    with ExitStack() as stack:
        own = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"
        postgres = stack.enter_context(running_server(f"listen_addresses={own}", DURABLE))
        database = postgres.copy()
        postgres.execute(JSON_EXTRACT, database)
        way = Network(5432, own)
        stack.callback(way.close)
        bucket = stack.enter_context(new_bucket(stack.enter_context(serving_objects())))
        environment = {
            **bucket.environment(),
            "FLOPWATCH_DATABASE_URL": f"postgresql+psycopg://flopwatch@127.0.0.1:{way.port}/{database}",
            "FLOPWATCH_ARTIFACTS_URL": bucket.url,
        }
        os.environ.update(bucket.environment())  # for obstore in this process
        networks = {"database_away": way, "store_away": bucket.network}
        yield Remote(data_dir, environment, postgres=postgres, database=database, bucket=bucket, networks=networks)
