"""What only PostgreSQL has: its lock, its errors, its answers that get lost, and what it would refuse to store."""

import contextlib
import itertools
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, select
from sqlmodel import SQLModel

from app.errors import STORE_UNAVAILABLE, CannotRunHere, DatabaseBusy, DatabaseGone, LeaseLost, StorageFailed
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database import postgresql
from app.store.database.engine import CONNECTIONS, Database, open_database, open_existing
from app.store.queue import fence
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, NewEvent, NewJob
from flopwatch.text import times
from tests.postgres import Proxy, Server
from tools.waiting import wait_until


@pytest.fixture
def engine() -> str:
    return "postgresql"


@pytest.fixture
def other(settings: Settings) -> Iterator[Database]:
    """Another process's, as it were."""
    with contextlib.closing(Database(settings.resolved_database_url, busy_timeout_s=0.3)) as opened:
        yield opened


def put(database: Database, name: str, value: object = 1) -> None:
    with database.write() as connection:
        connection.execute(insert(tables.setting), {"name": name, "value": value})


def names(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(tables.setting.c.name).order_by(tables.setting.c.name)).scalars())


class TestSchema:
    def test_the_upgraded_schema_is_that_of_the_tables(self, database: Database) -> None:
        with database.read() as connection:
            assert compare_metadata(MigrationContext.configure(connection), SQLModel.metadata) == []

    def test_control_of_the_comparison(self, database: Database) -> None:
        with database.migration() as connection:
            connection.exec_driver_sql("ALTER TABLE job ALTER COLUMN priority TYPE text")
            connection.exec_driver_sql("DROP INDEX ix_job_claimable")
        with database.read() as connection:
            found = compare_metadata(MigrationContext.configure(connection), SQLModel.metadata)
        kinds = {change[0][0] if isinstance(change, list) else change[0] for change in found}
        assert kinds == {"add_index", "modify_type"}

    def test_who_comes_first_migrates(self, postgres: Server, tmp_path: Path) -> None:
        postgres.execute("CREATE DATABASE fresh TEMPLATE template0")
        settings = Settings(data_dir=tmp_path, database_url=str(postgres.url("fresh")))
        try:
            with pytest.raises(CannotRunHere, match="start the server once"):
                open_existing(settings)
            failed: list[BaseException] = []

            def start() -> None:
                try:
                    open_database(settings).close()
                except BaseException as error:  # noqa: BLE001 - the test looks at it
                    failed.append(error)

            threads = [threading.Thread(target=start) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failed == []
            open_existing(settings).close()
        finally:
            postgres.execute("DROP DATABASE fresh WITH (FORCE)")

    def test_another_encoding_is_refused(self, postgres: Server, tmp_path: Path) -> None:
        postgres.execute("CREATE DATABASE ascii TEMPLATE template0 ENCODING 'SQL_ASCII'")
        with pytest.raises(CannotRunHere, match="ENCODING 'UTF8'"):
            open_database(Settings(data_dir=tmp_path, database_url=str(postgres.url("ascii"))))
        postgres.execute("DROP DATABASE ascii")


class TestTransactions:
    def test_a_read_is_one_snapshot_and_writes_nothing(self, database: Database, other: Database) -> None:
        with database.read() as connection:
            assert connection.execute(select(tables.setting.c.name)).all() == []
            put(other, "one")
            assert connection.execute(select(tables.setting.c.name)).all() == []
        assert names(database) == ["one"]
        with pytest.raises(StorageFailed, match="read-only"), database.read() as connection:
            connection.execute(insert(tables.setting), {"name": "two", "value": 1})

    def test_a_writer_that_waits_too_long_is_told_so(self, database: Database, other: Database) -> None:
        with database.write():
            started = time.monotonic()
            with pytest.raises(DatabaseBusy) as caught, other.write():
                pass
            assert time.monotonic() - started > 0.2
            assert (caught.value.status, other.busy_s() > 0) == (503, True)
            assert names(other) == []
        put(other, "one")
        assert other.busy_s() == 0

    @pytest.mark.parametrize(
        ("rows", "is_ended"), [(1, True), (3, True), (1, False)], ids=["one row", "many rows", "without the limit"]
    )
    def test_a_stopped_writer_does_not_keep_the_others(self, database, settings, monkeypatch, rows, is_ended) -> None:
        monkeypatch.setattr(postgresql, "WRITER_IDLE_S", 1 if is_ended else 60)
        with contextlib.closing(Database(settings.resolved_database_url, busy_timeout_s=3)) as patient:
            ends = pytest.raises(DatabaseBusy) if is_ended else contextlib.nullcontext()
            with ends, database.write() as connection:
                connection.execute(insert(tables.setting), [{"name": f"never{n}", "value": 1} for n in range(rows)])
                with contextlib.nullcontext() if is_ended else pytest.raises(DatabaseBusy):
                    put(patient, "one")
        assert names(database) == (["one"] if is_ended else ["never0"])

    def test_a_process_opens_no_more_connections_than_it_may(self, settings: Settings, postgres: Server) -> None:
        with contextlib.closing(open_database(settings, connections=2)) as database:
            watch = database.watch()
            threads = [threading.Thread(target=put, args=(database, f"{number}")) for number in range(12)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                watch.changed()
                names(database)
            opened = postgres.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'flopwatch' AND datname = "
                f"'{database.backend.engine.url.database}'"
            )
            assert (len(names(database)), opened) == (12, [(2,)])


class TestUpkeep:
    def test_its_size_is_known(self, database: Database, shop: Any) -> None:
        shop.submit()
        database.checkpoint()
        assert database.backend.size > 0

    def test_a_backup_is_another_programs(self, database: Database, tmp_path: Path) -> None:
        with pytest.raises(CannotRunHere, match=r"pg_dump -Fc -f .*copy"):
            database.backup(tmp_path / "copy")


def test_a_commit_is_noticed_when_others_can_see_it(database, postgres, monkeypatch) -> None:
    """Its place in the log moves before: here a standby's answer is missing. The control looks at the log."""
    monkeypatch.setattr(postgresql.Snapshots, "period_s", 0.0)
    watch, name = database.watch(), str(database.backend.engine.url.database)
    numbers = itertools.count()

    def position() -> Any:
        return postgres.execute("SELECT pg_current_wal_insert_lsn()")

    def waiting() -> list[Any]:
        found = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = "
        return postgres.execute(f"{found} '{name}'")

    def waiting_commit() -> tuple[int, int, threading.Thread]:
        """A commit that waits; the first ones do not, until the checkpointer has read the setting."""
        for number in numbers:
            inserted = f"SET synchronous_commit = on; INSERT INTO setting VALUES ('{number}', '1')"
            thread = threading.Thread(target=postgres.execute, args=(inserted, name))
            thread.start()
            while thread.is_alive():
                if found := waiting():
                    return number, found[0][0], thread
        raise AssertionError

    postgres.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgres.execute("SELECT pg_reload_conf()")
    wait_until(lambda: postgres.execute("SHOW synchronous_standby_names") == [("nobody",)], what="the setting")
    try:
        for _ in range(5):
            number, pid, thread = waiting_commit()
            while watch.changed():
                pass
            logged = position()
            assert str(number) not in names(database)
            postgres.execute(f"SELECT pg_cancel_backend({pid})")  # it waits no longer
            thread.join()
            assert str(number) in names(database)
            assert watch.changed()
            if position() == logged:  # nothing else was logged meanwhile
                return
    finally:
        postgres.execute("ALTER SYSTEM RESET synchronous_standby_names")
        postgres.execute("SELECT pg_reload_conf()")
    pytest.fail("the log is never quiet")


class TestValues:
    def test_what_it_would_refuse_is_stored(self, shop, queue, reading, record) -> None:
        claim = shop.running_job(name="n\0ul", labels={"a": "\ud800"})
        queue.report(claim, [NewEvent("log", {"text": "a\0b\udfffc\\u0000"}), NewEvent("log", {"nan": math.nan})])
        measured = [record(mean=math.nan, case={"c": "\0"}), record("other_ms", median=math.inf)]
        queue.finish(claim, Finish("succeeded", log="x\0y\ud83d\ude00\udc00", measurements=measured))
        job = reading.job(claim.job_id)[0]
        assert (job["name"], job["labels"]) == ("n\ufffdul", {"a": "\ufffd"})
        assert reading.log(claim.job_id) == "x\ufffdy\U0001f600\ufffd"
        assert reading.events(claim.job_id)[2]["data"]["text"] == "a\ufffdb\ufffdc\\u0000"
        assert [row["mean"] for row in reading.measurements(claim.job_id)["rows"]] == [None, 2.0]

    def test_texts_are_ordered_by_code_points_and_found_in_any_case(self, database: Database, postgres: Server) -> None:
        for name in ("b", "B", "a", "ä", "_"):
            put(database, name)
        assert names(database) == ["B", "_", "a", "b", "ä"]
        contains = select(tables.setting.c.name).where(tables.setting.c.name.contains("b"))
        with database.read() as connection:
            assert sorted(connection.execute(contains).scalars()) == ["B", "b"]
            columns = "SELECT count(*) FROM pg_attribute WHERE attrelid = 'job'::regclass AND attcollation != 0"
            assert connection.exec_driver_sql(f"{columns} AND attcollation != '\"C\"'::regcollation").scalar_one() == 0

    def test_as_many_jobs_as_a_table_may_have_fit_a_statement(self, database: Database) -> None:
        with database.read() as connection:
            assert connection.execute(select(tables.job.c.id).where(tables.job.c.id.in_(range(1, 60_000)))).all() == []


class TestNoServer:
    def test_it_is_gone_and_comes_back(self, settings: Settings, database: Database, postgres: Server) -> None:
        put(database, "one")
        ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
        with pytest.raises(DatabaseGone), database.write() as connection:  # noqa: PT012
            postgres.execute(f"{ends} '{database.backend.engine.url.database}'")
            connection.execute(insert(tables.setting), {"name": "two", "value": 1})
        postgres.execute(f"{ends} '{database.backend.engine.url.database}'")
        assert names(database) == ["one"]

    def test_a_connection_that_is_cut_after_the_answer_is_closed_quietly(self, database, postgres) -> None:
        for number in range(CONNECTIONS + 5):  # none stays taken
            with database.read() as connection:
                pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                postgres.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
            with database.read() as connection:
                assert connection.exec_driver_sql(f"SELECT {number}").scalar_one() == number

    @pytest.mark.parametrize("words", ["connection", "does not exist"])
    def test_it_is_not_there(self, postgres: Server, tmp_path: Path, words: str) -> None:
        url = postgres.url("missing") if words == "does not exist" else f"postgresql:///x?host={tmp_path}"
        with pytest.raises(DatabaseGone, match=words) as caught:
            open_database(Settings(data_dir=tmp_path / "data", database_url=str(url)))
        assert caught.value.status == 503

    def test_a_password_is_never_shown(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path, database_url=f"postgresql://me:secret@/x?host={tmp_path}")
        with pytest.raises(DatabaseGone) as caught:
            open_database(settings)
        assert "secret" not in str(caught.value)

    def test_a_missing_driver_is_named(self, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "psycopg", None)
            with pytest.raises(CannotRunHere, match=r"flopwatch\[postgresql\]"):
                Database(settings.resolved_database_url)


@pytest.fixture
def proxy(postgres: Server, tmp_path: Path) -> Iterator[Proxy]:
    (tmp_path / "proxy").mkdir()
    with contextlib.closing(Proxy(postgres.folder, tmp_path / "proxy")) as running:
        yield running


@pytest.fixture
def far_queue(proxy: Proxy, database: Database, tmp_path: Path) -> Iterator[Queue]:
    """The queue as a worker has it whose network fails."""
    url = database.backend.engine.url.update_query_dict({"host": str(tmp_path / "proxy")})
    with contextlib.closing(Database(url)) as far:
        yield Queue(far)


class TestLostCommits:
    """The connection breaks when a COMMIT is sent: before it reaches the server, or before its answer comes back."""

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("state", ["succeeded", "failed"])
    def test_an_end_is_recorded_once(self, when, state, shop, far_queue, proxy, reading, results) -> None:
        claim = shop.running_job()
        ending = replace(results, state=state, error=None if state == "succeeded" else {"code": "crashed"})
        proxy.when = when
        with pytest.raises(STORE_UNAVAILABLE):
            far_queue.finish(claim, ending)
        recorded = "running" if when == "before" else state
        wait_until(lambda: reading.job(claim.job_id)[0]["state"] == recorded, what="the server's commit")
        assert far_queue.finish(claim, ending) == state
        assert reading.job(claim.job_id)[0]["state"] == state
        assert len(reading.measurements(claim.job_id)["rows"]) == 1
        assert [event["type"] for event in reading.events(claim.job_id)].count("done") == 1

    def test_control_without_the_question_the_worker_believes_that_it_lost_its_lease(
        self, shop: Any, far_queue: Queue, proxy: Proxy, reading: Reading, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fence, "state_of", lambda _connection, _claim: None)
        claim = shop.running_job()
        proxy.when = "after"
        with pytest.raises(STORE_UNAVAILABLE):
            far_queue.finish(claim, Finish("succeeded"))
        wait_until(lambda: reading.job(claim.job_id)[0]["state"] == "succeeded", what="the server's commit")
        with pytest.raises(LeaseLost):
            far_queue.finish(claim, Finish("succeeded"))

    def test_who_has_lost_the_attempt_is_still_told_so(self, shop: Any, queue: Queue) -> None:
        claim = shop.running_job()
        queue.recover(queue.running()[0])
        with pytest.raises(LeaseLost):
            queue.finish(claim, Finish("succeeded"))


@pytest.mark.parametrize("asks", [True, False])
def test_times_are_the_databases(settings: Settings, monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """A host whose clock is late stores the server's time; the control does not ask for it."""

    class Late(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(minutes=5)

    monkeypatch.setattr(times, "_ahead", timedelta())
    monkeypatch.setattr(times, "datetime", Late)
    if not asks:
        monkeypatch.setattr(postgresql, "set_clock", lambda _: None)
    with contextlib.closing(open_database(settings)) as database:
        Queue(database).submit(NewJob(BenchmarkSpec()))
        created = datetime.fromisoformat(Reading(database).job(1)[0]["created_at"])
    assert (datetime.now(UTC) - created).total_seconds() == pytest.approx(0 if asks else 300, abs=10)
