"""`flopwatch move`: a SQLite data folder goes to PostgreSQL."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Table, create_engine, select
from sqlmodel import SQLModel
from typer.testing import CliRunner

from app.cli.commands import cli
from app.errors import CannotRunHere
from app.results.pivoting import table
from app.server.access import lock_folder
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.checking import examine
from app.store.database import moved, moving
from app.store.database.engine import Database, open_database, open_existing
from app.store.files.artifacts import ArtifactFiles
from app.store.files.objects import ObjectFiles
from app.store.files.opening import open_files
from app.store.files.uploads import Uploads
from app.store.keeping.baselines import Baselines
from app.store.keeping.deleting import delete_job
from app.store.queue.lease import with_agreed_lease
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.measurements import JobChoice
from app.store.reading.queries import Reading
from app.store.records import Finish, Idempotency, NewEvent, NewJob, StoredArtifact, UnitRecord
from tests.app.store.conftest import Shop
from tests.builders import measured
from tests.databases import put_database
from tests.object_stores import Bucket
from tests.postgres import Server


def move(folder: Path, url: str) -> Any:
    return CliRunner().invoke(cli, ["move", "--to", url], env={"FLOPWATCH_DATA_DIR": str(folder)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something in nearly every table; the newest job was deleted."""
    put_database(tmp_path)
    with closing(open_database(Settings(data_dir=tmp_path))) as database:
        queue = Queue(database)
        open_files(Settings(data_dir=tmp_path), database)
        with_agreed_lease(database, Settings(data_dir=tmp_path))  # a number, as which SQLite stores its JSON
        Registration(database).register_worker("gone", "elsewhere", 1, ["benchmark"], [], [{"type": "cpu"}], {})
        Registration(database).set_worker_state("gone", "stopped")
        jobs = [NewJob(BenchmarkSpec(batch_size=size), point={"batch_size": size}) for size in (1, 2)]
        queue.submit_sweep("s\0", {"a": "ü"}, {"kind": "benchmark"}, {"batch_size": [0, 1, 2]}, [], jobs)
        queue.submit(NewJob(BenchmarkSpec(), "n", {"k": "\0"}), Idempotency("key", "POST /jobs", "digest"))
        for value in (1.5, float("nan"), 2.5):
            claim = Shop(queue, Registration(database)).claim("gone")
            queue.report(claim, [NewEvent("log", {"text": "a\0b"})])
            results = [measured("step_ms", value, model="ü", context_length=8)]
            files = [StoredArtifact(0, "a", "trace", "text/plain", 2**40, "ab" * 32)]
            units = [UnitRecord(0, "u", "succeeded", environment={"gpu": None}, validity={"verdict": "valid"})]
            queue.finish(claim, Finish("succeeded", measurements=results, artifacts=files, units=units, log="x"))
        Baselines(database).put("main", job=1)
        queue.cancel(queue.submit(NewJob(BenchmarkSpec())).response["id"])
        delete_job(database, 4)
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET spec = '{\"half\": ' WHERE id = 2")
    return tmp_path


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    with postgres.database() as empty:
        yield empty.render_as_string(hide_password=False)


def everything(database: Database) -> dict[str, list[Any]]:
    with database.read() as connection:
        return {
            one.name: [tuple(row) for row in connection.execute(select(one).order_by(*one.primary_key.columns))]
            for one in SQLModel.metadata.sorted_tables
        }


def answers(database: Database) -> list[Any]:
    reading = Reading(database)
    shown = [table(database, JobChoice(jobs=[1, 3])), table(database, JobChoice(sweep=1))]
    return [*shown, reading.jobs(), reading.sweep(1), reading.workers(), [reading.events(job) for job in (1, 2, 3)]]


def test_every_row_comes_along_and_the_folder_keeps_them(folder: Path, url: str) -> None:
    with closing(open_database(Settings(data_dir=folder))) as source:
        rows, answered = everything(source), answers(source)
    result = move(folder, url)
    assert result.exit_code == 0, result.output
    assert {f"{name}: {len(of_table)}" for name, of_table in rows.items()} <= set(result.stdout.splitlines())
    assert sum(map(len, rows.values())) > 20
    with closing(open_database(Settings(data_dir=folder, database_url=url))) as target:
        assert repr(everything(target)) == repr(rows).replace(r"\x00", "\ufffd")
        assert repr(answers(target)) == repr(answered).replace(r"\x00", "\ufffd")
        assert Queue(target).submit(NewJob(BenchmarkSpec())).response["id"] == 5, "4 is not used again"
    again = move(folder, url)
    assert (again.exit_code, "moved to" in again.stderr) == (1, True)
    undone = CliRunner().invoke(cli, ["move", "--undo"], env={"FLOPWATCH_DATA_DIR": str(folder)})
    assert (undone.exit_code, "prune --claim-files" in undone.stdout) == (0, True), undone.output
    with closing(open_existing(Settings(data_dir=folder))) as source:
        assert everything(source) == rows
    again = move(folder, url)
    assert (again.exit_code, "has rows" in again.stderr) == (1, True)
    open_existing(Settings(data_dir=folder)).close()  # a move that fails leaves no mark


@pytest.mark.parametrize("entrance", ["serve", "prune", "move", "backup"])
def test_no_command_uses_a_database_that_has_moved(folder: Path, url: str, entrance: str) -> None:
    arguments = {"move": ["move", "--to", url], "backup": ["backup", str(folder / "copy")]}
    environment = {"FLOPWATCH_DATA_DIR": str(folder), "FLOPWATCH_PORT": "0"}  # `--port` would stay in this process's
    assert move(folder, url).exit_code == 0
    done = CliRunner().invoke(cli, arguments.get(entrance, [entrance]), env=environment)
    assert (done.exit_code, "flopwatch move --undo" in done.stderr) == (1, True), done.stderr


def test_no_worker_uses_a_database_that_has_moved(folder: Path, url: str) -> None:
    assert move(folder, url).exit_code == 0
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", "worker"],
        env={**os.environ, "FLOPWATCH_DATA_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode != 0, "flopwatch move --undo" in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize(
    ("files", "lacking"),
    [(None, None), ("files", None), (None, ""), (None, "{}/data/flopwatch.sqlite3"), (None, "{}/flopwatch.sqlite3")],
)
def test_no_database_is_made_in_a_folder_of_postgresql(tmp_path, url, files, lacking) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    wrong = f"sqlite:///{lacking.format(tmp_path)}" if lacking else lacking
    bare = Settings(data_dir=folder, artifacts_url=None if files is None else str(tmp_path / files), database_url=wrong)
    settings = bare.model_copy(update={"database_url": url})
    with closing(open_database(settings)) as database:
        open_files(settings, database)
        open_files(settings, database)
    for enter in (open_database, open_existing):
        with pytest.raises(CannotRunHere, match=r"belong to the database .*set FLOPWATCH_DATABASE_URL"):
            enter(bare)
    assert [one.cure for one in examine(bare) if one.name == "database"] == ["set FLOPWATCH_DATABASE_URL"]
    environment = {"FLOPWATCH_DATA_DIR": str(folder), "FLOPWATCH_DATABASE_URL": wrong}
    backup = CliRunner().invoke(cli, ["backup", str(copy)], env=environment)
    assert (backup.exit_code, "set FLOPWATCH_DATABASE_URL" in backup.stderr) == (1, True)
    assert not [*tmp_path.rglob("flopwatch.sqlite3*"), *tmp_path.glob("copy*")]
    (folder / "artifacts" / "owner.json").unlink()
    open_database(bare).close()  # control: the note is what keeps it from being made


@pytest.mark.parametrize("dies", ["before the copy's commit", "after it"])
def test_a_move_that_is_killed_leaves_one_database_in_use(folder, url, monkeypatch, dies) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(moving, "_continue_ids" if dies.startswith("before") else "mark_moved", die)
    with closing(open_existing(Settings(data_dir=folder))) as source:
        with source.write() as connection:
            moved.mark_moved(connection, "there")
        with closing(open_database(Settings(data_dir=folder, database_url=url))) as target, pytest.raises(Killed):
            moving._copied(source, target)  # what comes after the first mark
    with pytest.raises(CannotRunHere, match="moved to there"):
        open_existing(Settings(data_dir=folder))


def test_no_transaction_of_postgresql_waits_while_sqlite_counts(folder, url, monkeypatch) -> None:
    """Its server ends one that does nothing for long."""
    count, watcher = moving._count, create_engine(url)
    open_ones: dict[str, set[int]] = {"sqlite": set(), "postgresql": set()}
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
    )

    def watched(connection: Connection, table: Table) -> int:
        with watcher.connect() as watching:
            open_ones[connection.dialect.name].add(watching.exec_driver_sql(query).scalar_one())
        return count(connection, table)

    monkeypatch.setattr(moving, "_count", watched)
    result = move(folder, url)
    watcher.dispose()
    assert result.exit_code == 0, result.output
    assert open_ones == {"sqlite": {0}, "postgresql": {1}}


def test_a_running_server_or_worker_is_stopped_first(folder: Path, url: str) -> None:
    lock = lock_folder(Settings(data_dir=folder))
    refused = move(folder, url)
    assert (refused.exit_code, "A server runs on" in refused.stderr) == (1, True)
    os.close(lock)
    with closing(open_database(Settings(data_dir=folder))) as source:
        Registration(source).register_worker("here", socket.gethostname(), os.getpid(), [], [], [], {})
    refused = move(folder, url)
    assert (refused.exit_code, "here" in refused.stderr) == (1, True)


def test_only_postgresql_is_moved_to(folder: Path, tmp_path: Path) -> None:
    refused = move(folder, f"sqlite:///{tmp_path / 'other.sqlite3'}")
    assert (refused.exit_code, "postgresql+psycopg://" in refused.stderr) == (1, True)
    assert not [*tmp_path.glob("other.sqlite3*")]


class TestFiles:
    """A folder's files go to an object store."""

    def test_they_are_copied_once(self, tmp_path: Path, bucket: Bucket) -> None:
        settings = Settings(data_dir=tmp_path)
        with closing(open_database(settings)) as database:
            sha256 = Uploads(database, ArtifactFiles(settings.artifacts_dir)).put(b"code")[0]["sha256"]
            for said in ("1 files copied, 0 were there", "0 files copied, 1 were there"):
                moved = move(tmp_path, bucket.url)
                assert (moved.exit_code, said in moved.output) == (0, True), moved.output
            assert ObjectFiles(bucket.url, database).read(sha256) == b"code"

    @pytest.mark.parametrize(
        ("url", "told"),
        [("s3://key:secret@bucket", "must have no credentials"), ("s3://no-such-bucket", "NoSuchBucket")],
    )
    def test_what_cannot_be_copied_to_is_refused(self, tmp_path: Path, bucket: Bucket, url: str, told: str) -> None:
        settings = Settings(data_dir=tmp_path)
        with closing(open_database(settings)) as database:
            Uploads(database, ArtifactFiles(settings.artifacts_dir)).put(b"code")
        moved = move(tmp_path, url)
        assert (moved.exit_code, told in moved.output.replace("\n", " ")) == (1, True), moved.output
        assert moved.output.count("The object store cannot be used now") < 2, "the title says it"


def test_a_user_who_may_not_identify_the_server_moves_nothing(folder: Path, postgres: Server) -> None:
    with postgres.database() as url:
        postgres.execute("CREATE ROLE poor LOGIN", str(url.database))
        try:
            postgres.execute(
                "GRANT ALL ON ALL TABLES IN SCHEMA public TO poor; "
                "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC",
                str(url.database),
            )
            result = move(folder, url.set(username="poor").render_as_string(hide_password=False))
            assert (result.exit_code, "pg_control_system" in result.stderr) == (1, True), result.output
            open_existing(Settings(data_dir=folder)).close()
        finally:
            postgres.execute(
                "GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC; DROP OWNED BY poor; DROP ROLE poor",
                str(url.database),
            )
