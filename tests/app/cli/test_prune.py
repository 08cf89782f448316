"""`flopwatch prune`: on the database itself, with or without a server."""

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from app.cli.commands import cli
from app.settings import Settings
from app.store import tables
from app.store.database.engine import open_database
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, Idempotency
from app.store.tables import utc_now
from tests.app.store.conftest import Shop
from tests.databases import put_database


def prune(folder: Path, *options: str, **settings: str) -> Any:
    return CliRunner().invoke(cli, ["prune", *options], env={"FLOPWATCH_DATA_DIR": str(folder), **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A database with a finished job of last year, and its key."""
    put_database(tmp_path)
    database = open_database(Settings(data_dir=tmp_path))
    shop = Shop(Queue(database), Registration(database))
    claim = shop.running_job(idempotency=Idempotency("key", "POST /jobs", "digest"))
    shop.queue.finish(claim, Finish("succeeded", log="x" * 1_000_000))
    with database.write() as connection:
        old = utc_now().replace(year=utc_now().year - 1, day=1)
        connection.execute(update(tables.job).values(finished_at=old))
        connection.execute(update(tables.idempotency_key).values(created_at=old))
    database.close()
    return tmp_path


def jobs(folder: Path) -> int:
    database = open_database(Settings(data_dir=folder))
    try:
        return sum(Reading(database).counts().values())
    finally:
        database.close()


def test_it_says_what_would_go_and_then_lets_it_go(folder: Path) -> None:
    planned = prune(folder, "--dry-run", FLOPWATCH_KEEP_JOBS_DAYS="30")
    assert planned.exit_code == 0, planned.output
    numbers = "1 jobs, 0 sweeps, 0 events of finished jobs, 1 idempotency keys, 0 workers, "
    assert planned.stdout.startswith(f"would delete: {numbers}")
    assert jobs(folder) == 1
    size = (folder / "flopwatch.sqlite3").stat().st_size
    done = prune(folder, FLOPWATCH_KEEP_JOBS_DAYS="30")
    assert done.stdout.startswith(f"deleted: {numbers}")
    assert jobs(folder) == 0
    assert (folder / "flopwatch.sqlite3").stat().st_size < size - 900_000
    assert re.search(r"flopwatch\.sqlite3: \d+ bytes\n$", done.stdout)
    assert prune(folder).stdout.startswith(f"deleted: {re.sub('1', '0', numbers)}")


def test_no_files_are_claimed_while_workers_run(folder: Path) -> None:
    database = open_database(Settings(data_dir=folder))
    try:
        Registration(database).register_worker("alive", "host", 1, [], [], [], {})
    finally:
        database.close()
    refused = prune(folder, "--claim-files")
    assert (refused.exit_code, "Workers run (alive): stop them first" in refused.output) == (1, True), refused.output
    assert prune(folder).exit_code == 0, "control: without --claim-files"


def test_it_makes_no_database(tmp_path: Path) -> None:
    missing = prune(tmp_path / "none")
    assert missing.exit_code == 1
    assert "There is no database" in missing.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "1e9", "for ever"])
def test_ages_that_make_no_sense(tmp_path: Path, days: str) -> None:
    refused = prune(tmp_path, FLOPWATCH_KEEP_JOBS_DAYS=days)
    assert refused.exit_code == 1
    assert "FLOPWATCH_KEEP_JOBS_DAYS" in refused.stderr
