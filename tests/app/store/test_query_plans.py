"""Lists are answered from an index, also with a hundred thousand jobs: what SQLite means to do with each statement."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event as events
from sqlalchemy import insert

from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.engine import Database
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import NewJob
from app.store.tables import utc_now


def plan(database: Database, filters: dict[str, Any]) -> list[str]:
    """SQLite's plan of the one statement that lists jobs."""
    executed: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            executed.append((statement, parameters))

    events.listen(database.backend.engine, "before_cursor_execute", note)
    Reading(database).jobs(**filters)
    events.remove(database.backend.engine, "before_cursor_execute", note)
    ((statement, parameters),) = executed
    with database.read() as connection:
        return [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]


@pytest.mark.parametrize(
    ("filters", "step"),
    [
        ({}, "SCAN job"),  # from the newest id down, as far as the page goes
        ({"after": "9"}, "SEARCH job USING INTEGER PRIMARY KEY (rowid<?)"),
        ({"state": "failed"}, "SEARCH job USING INDEX ix_job_state_id (state=?)"),
        ({"kind": "benchmark"}, "SEARCH job USING INDEX ix_job_kind_id (kind=?)"),
        ({"sweep": 1}, "SEARCH job USING INDEX ix_job_sweep_id (sweep_id=?)"),
        ({"labels": [("a", "b")]}, "SEARCH job_label USING COVERING INDEX ix_job_label_key_value (key=? AND value=?)"),
        ({"labels": [("a", "b")]}, "SEARCH job USING INTEGER PRIMARY KEY (rowid=?)"),
        ({"labels": [("a", "b")], "state": "failed"}, "SEARCH job USING INDEX ix_job_state_id (state=? AND id=?)"),
    ],
)
def test_jobs_are_listed_from_an_index(database: Database, filters: dict[str, Any], step: str) -> None:
    steps = plan(database, filters)
    assert step in steps
    assert not [other for other in steps if "TEMP B-TREE" in other or ("SCAN" in other and filters)]


def work_of_a_submission(database: Database) -> int:
    """What SQLite does to check a job's names, store it and say why it waits, in hundreds of its instructions."""
    done = 0

    def count() -> int:
        nonlocal done
        done += 1
        return 0

    raw = database.backend.engine.raw_connection()
    raw.driver_connection.set_progress_handler(count, 100)  # type: ignore[union-attr]
    raw.close()  # to the pool, which gives it to the next statements
    Reading(database).known_names()
    Queue(database).submit(NewJob(BenchmarkSpec()))
    return done


def add_workers_that_are_gone(database: Database, number: int) -> None:
    now = utc_now()
    row = {
        "hostname": "host",
        "pid": 1,
        "state": "stopped",
        "kinds": ["benchmark"],
        "capabilities": ["attention:eager"],
    }
    row |= {"devices": [{"type": "cpu"}], "versions": {}, "beat": 0, "registered_at": now, "last_seen_at": now}
    with database.write() as connection:
        connection.execute(insert(tables.worker), [{"id": f"gone-{n}", **row} for n in range(number)])


def test_submission_reads_no_workers_that_are_gone(database: Database, shop: Any) -> None:
    shop.register()
    before = work_of_a_submission(database)
    add_workers_that_are_gone(database, 2000)
    assert work_of_a_submission(database) <= before + 2


def test_control_of_the_index_of_workers(database: Database, shop: Any) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("DROP INDEX ix_worker_state")
    shop.register()
    before = work_of_a_submission(database)
    add_workers_that_are_gone(database, 2000)
    assert work_of_a_submission(database) > before + 50
