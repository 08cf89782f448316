"""A stored value that cannot be read costs its own row only: lists, claims and watchers go on; the row is marked."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json
from sqlalchemy import JSON, Column, Table, text
from sqlmodel import SQLModel

from app import results
from app.errors import Conflict
from app.results.reported import list_tables
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.queue.lease import Watcher, agreed
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, Idempotency, NewJob, Offer, TableRecord, UnitRecord
from app.store.stored_json import StoredJson
from app.store.tables import UtcDateTime
from tests.app.store.conftest import CAPABILITIES, KINDS, Shop
from tests.builders import measurement
from tests.databases import put_database

COLUMNS = [
    (table, column)
    for table in SQLModel.metadata.sorted_tables
    for column in table.columns
    if isinstance(column.type, StoredJson)
]
OFFER = Offer(KINDS, CAPABILITIES, total_gpus=0, free_gpus=0, idle=True)
KEY = Idempotency("key", "POST /jobs", "digest")
BROKEN = ['{"half": ', '"a text"', "null", "7"]


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that nobody has open: job 1 of a sweep failed, 2 has results, 3 runs, 4 and 5 wait."""
    folder = tmp_path_factory.mktemp("stocked")
    file = put_database(folder)
    database = open_database(Settings(data_dir=folder))
    queue, shop = Queue(database), Shop(Queue(database), Registration(database))
    shop.register()
    shop.register("other")
    job = NewJob(BenchmarkSpec(), labels={"a": "b"}, point={"batch_size": 0})
    queue.submit_sweep("s", {"a": "b"}, {"kind": "benchmark"}, {"batch_size": [1]}, [], [job])
    error = {"title": "It failed", "code": "failed", "detail": "so"}
    units = [UnitRecord(0, "u", "failed", environment={}, validity={})]
    queue.finish(shop.claim(), Finish("failed", error=error, units=units))
    columns = [{"name": "ms", "type": "number", "unit": None}]
    table = TableRecord(0, "kernels", columns, 1, zlib.compress(b"[[1.5]]"))
    queue.finish(
        shop.running_job(),
        Finish("succeeded", measurements=[measurement(case={"context_length": 1})], tables=[table]),
    )
    shop.running_job(max_attempts=1)
    shop.submit(labels={"team": "a"}, idempotency=KEY)
    shop.submit()
    agreed(database, Settings(data_dir=folder))
    database.checkpoint()
    database.close()
    return file


@pytest.fixture
def database(stocked: Path, tmp_path: Path) -> Iterator[Database]:
    shutil.copy(stocked, tmp_path)
    database = open_database(Settings(data_dir=tmp_path))
    yield database
    database.close()


def everything(database: Database) -> Iterator[Any]:
    """What pages and lists read."""
    reading = Reading(database)
    jobs, _ = reading.jobs()
    yield jobs
    yield reading.sweeps()
    yield reading.sweep(1)
    yield reading.workers()
    yield [sorted(names) for names in reading.known_names().values()]
    for job_id in range(1, 6):
        yield reading.job(job_id)
        yield from (part(job_id) for part in (reading.events, reading.attempts, reading.log, reading.units))
        yield from (part(job_id) for part in (reading.measurements, reading.artifacts))
        yield list_tables(database, job_id)
    yield results.render(results.table(database, results.JobChoice()), "json")


def break_column(database: Database, table: Table, column: Column[Any], value: str) -> None:
    with database.write() as connection:
        connection.execute(text(f'UPDATE "{table.name}" SET "{column.name}" = :value'), {"value": value})


def lose_all(database: Database) -> None:
    """Let a lease pass in which no worker gives a sign of life."""
    now = [0.0]
    watcher = Watcher(Queue(database), Registration(database), 30.0, lambda: now[0])
    for now[0] in (0.0, 15.0, 30.0, 45.0):
        watcher.poll()


def goes_on(database: Database) -> None:
    """Do all that reads rows."""
    for found in everything(database):
        to_json(found)
    queue = Queue(database)
    lose_all(database)
    assert Reading(database).job(3)[0]["state"] == "failed"
    agreed(database, Settings())
    claim = queue.claim("new", OFFER)
    if claim is not None:
        assert (claim.job_id, claim.spec["kind"]) == (4, "benchmark")
    with suppress(Conflict):  # it has failed, for its row is broken
        queue.cancel(5)
    with suppress(Conflict):  # it cannot be resumed
        queue.resume_sweep(1)
    with suppress(Conflict):  # it cannot be repeated
        queue.first_answer(KEY)
    queue.delete(1)


@pytest.mark.parametrize("name", sorted({table.name for table, _ in COLUMNS}))
def test_no_broken_column_stops_the_queue(database: Database, name: str) -> None:
    for number, (table, column) in enumerate(COLUMNS):
        if table.name == name:
            break_column(database, table, column, BROKEN[number % len(BROKEN)])
    goes_on(database)


def test_no_broken_time_stops_the_queue(database: Database) -> None:
    for table in SQLModel.metadata.sorted_tables:
        for column in table.columns:
            if isinstance(column.type, UtcDateTime):
                break_column(database, table, column, "yesterday")
    goes_on(database)
    assert Reading(database).job(2)[0]["created_at"] is None


def test_what_cannot_be_done_with_a_broken_row_is_refused(database: Database) -> None:
    for table, column in COLUMNS:
        if table.name in ("sweep", "idempotency_key", "result_table"):
            break_column(database, table, column, BROKEN[0])
    with pytest.raises(Conflict, match="cannot be resumed"):
        Queue(database).resume_sweep(1)
    with pytest.raises(Conflict, match="number 4"):
        Queue(database).first_answer(KEY)
    with pytest.raises(Conflict, match="'kernels'"):
        results.result_table(database, 2, "kernels")


def test_control_of_the_stored_json(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredJson, "result_processor", JSON.result_processor)
    for table, column in COLUMNS:
        if (table.name, column.name) == ("job", "requirements"):
            break_column(database, table, column, BROKEN[0])
    with pytest.raises(ValueError, match="Expecting"):
        Queue(database).claim("new", OFFER)
    with pytest.raises(ValueError, match="Expecting"):
        Reading(database).jobs()


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("column", ["spec", "requirements"])
def test_a_broken_row_fails_its_own_job_only(
    database: Database, column: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with database.write() as connection:
        connection.execute(text(f"UPDATE job SET {column} = :value WHERE id = 4"), {"value": value})
    reading = Reading(database)
    job, _ = reading.job(4)
    assert (job["state"], job["broken"]["code"]) == ("queued", "unreadable")
    assert column in job["broken"]["detail"]
    claim = Queue(database).claim("new", OFFER)
    assert claim is not None
    assert claim.job_id == 5
    assert "job 4 fails" in caplog.text
    job, _ = reading.job(4)
    assert (job["state"], job["error"]["code"]) == ("failed", "unreadable")
    assert reading.job(5)[0]["broken"] is None
    assert Queue(database).delete(4) == []
