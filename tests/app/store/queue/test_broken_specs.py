"""A stored spec that cannot be read fails its own job: lists show it, and claims and watchers go on."""

import json

import pytest
from sqlalchemy import JSON, text

from app.errors import Conflict
from app.specs.benchmark import BenchmarkSpec
from app.store.column_types import StoredJson
from app.store.database.engine import Database
from app.store.keeping.deleting import delete_job
from app.store.queue.transitions import Queue
from app.store.records import NewJob

BROKEN = ['{"half": ', '"a text"', "null", "7"]


def break_column(database: Database, table: str, column: str, value: str) -> None:
    """Store this text in the column of row 1."""
    with database.write() as connection:
        connection.execute(text(f"UPDATE {table} SET {column} = :value WHERE id = 1"), {"value": value})


@pytest.mark.parametrize(("column", "value"), [*(("spec", it) for it in BROKEN), ("requirements", BROKEN[0])], ids=str)
def test_a_job_with_a_broken_spec_fails_and_the_next_runs(database, reading, shop, column, value, caplog) -> None:
    shop.register()
    first, second = shop.submit(), shop.submit()
    break_column(database, "job", column, value)
    listed, _ = reading.jobs()
    assert [(job["id"], job["broken"] is not None) for job in listed] == [(second, False), (first, True)]
    assert (listed[1]["state"], listed[1]["broken"]["code"]) == ("queued", "unreadable")
    assert column in listed[1]["broken"]["detail"]
    assert shop.claim().job_id == second
    assert "the job fails" in caplog.text
    job, _ = reading.job(first)
    assert (job["state"], job["error"]["code"]) == ("failed", "unreadable")
    assert delete_job(database, first) == []


def test_control_of_the_stored_json(engine, database, reading, shop, monkeypatch) -> None:
    as_text = (
        (lambda *_: lambda value: value and json.loads(value)) if engine == "postgresql" else JSON.result_processor
    )
    monkeypatch.setattr(StoredJson, "result_processor", as_text)
    for one in (database._reader, database._writer):  # engines share what they have compiled
        monkeypatch.setattr(one, "_compiled_cache", None)
    shop.register()
    shop.submit()
    break_column(database, "job", "spec", BROKEN[0])
    with pytest.raises(ValueError, match="Expecting"):
        shop.claim()
    with pytest.raises(ValueError, match="Expecting"):
        reading.jobs()


@pytest.mark.parametrize("column", ["options", "labels", "base"])
def test_a_sweep_with_a_broken_row_is_not_resumed(database: Database, queue: Queue, column: str) -> None:
    job = NewJob(BenchmarkSpec(), labels={"a": "b"}, point={"batch_size": 0})
    queue.submit_sweep("s", {"a": "b"}, {"kind": "benchmark"}, {"batch_size": [1]}, [], [job])
    queue.cancel_sweep(1)
    break_column(database, "sweep", column, BROKEN[0])
    with pytest.raises(Conflict, match=f"cannot be resumed. What is stored as {column} cannot be read"):
        queue.resume_sweep(1)
