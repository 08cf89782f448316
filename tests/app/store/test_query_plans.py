"""Lists are answered from an index, also with a hundred thousand jobs: what SQLite means to do with each statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event as events

from app.specs.benchmark import BenchmarkSpec
from app.store import results
from app.store.engine import Database
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import Finish, NewJob


def plans(database: Database, read: Callable[[], Any]) -> list[str]:
    """SQLite's plan of every statement that `read` runs."""
    executed: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            executed.append((statement, parameters))

    events.listen(database.backend.engine, "before_cursor_execute", note)
    read()
    events.remove(database.backend.engine, "before_cursor_execute", note)
    with database.read() as connection:
        return [
            row.detail
            for statement, parameters in executed
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


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
    steps = plans(database, lambda: Reading(database).jobs(**filters))
    assert step in steps
    assert not [other for other in steps if "TEMP B-TREE" in other or ("SCAN" in other and filters)]


READS: dict[str, Callable[[Database, int], Any]] = {
    "job": lambda database, job: Reading(database).job(job),
    "events": lambda database, job: Reading(database).events_page(job, after=1),
    "changed jobs": lambda database, _: (Reading(database).changed_jobs(None), Reading(database).changed_jobs(1)),
    "attempts": lambda database, job: Reading(database).attempts(job),
    "log": lambda database, job: Reading(database).log(job),
    "measurements": lambda database, job: Reading(database).measurements(job, after="1", samples=True),
    "units": lambda database, job: Reading(database).units(job),
    "artifacts": lambda database, job: Reading(database).artifacts(job),
    "sweep": lambda database, _: Reading(database).sweep(1),
    "sweeps": lambda database, _: Reading(database).sweeps(after="9"),
    "version of a job's page": lambda database, job: Reading(database).job_page_version(job),
    "version of a sweep's page": lambda database, _: Reading(database).sweep_page_version(1),
    "counts": lambda database, _: Reading(database).counts(),
    "a job's table": lambda database, job: results.table(database, jobs=[job]),
    "the beginning of a job's table": lambda database, job: results.table(database, jobs=[job], first=9),
    "a sweep's table": lambda database, _: results.table(database, sweep=1),
    "the beginning of a sweep's table": lambda database, _: results.table(database, sweep=1, first=9),
    "tables of a job": lambda database, job: results.list_tables(database, job),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_job_or_a_sweep_shows_is_found_by_an_index(
    name: str, database: Database, queue: Queue, shop: Any, record: Any
) -> None:
    new = [NewJob(BenchmarkSpec(seed=seed), point={"seed": seed}) for seed in range(2)]
    queue.submit_sweep(None, {}, {}, {"seed": [0, 1]}, [], new)
    claim = shop.claim()
    queue.finish(claim, Finish("succeeded", measurements=[record()], log="done"))
    steps = plans(database, lambda: READS[name](database, claim.job_id))
    assert steps
    whole = [step for step in steps if step.startswith("SCAN") and "COVERING INDEX" not in step]
    assert not [step for step in whole if step.split()[1] not in LISTED], steps


LISTED = {"(subquery", "job_label"}
"""What may be scanned: a list of its own making."""
