"""Statements use an index: what SQLite plans for each."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event as events

from app import results
from app.results import JobChoice
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, NewJob
from app.store.tables import utc_now
from tests.builders import measurement


@pytest.fixture
def engine() -> str:
    """Each engine plans by itself."""
    return "sqlite"


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
        ({"submitted_by": "ada"}, "SEARCH job USING INDEX ix_job_submitted_by_id (submitted_by=?)"),
        ({"sweep": 1}, "SEARCH job USING INDEX ix_job_sweep_id (sweep_id=?)"),
        ({"labels": [("a", "b")]}, "SEARCH job_label USING COVERING INDEX ix_job_label_key_value (key=? AND value=?)"),
        ({"labels": [("a", "b")]}, "SEARCH job USING INTEGER PRIMARY KEY (rowid=?)"),
        ({"labels": [("a", "b")], "state": "failed"}, "SEARCH job USING INDEX ix_job_state_id (state=? AND id=?)"),
        ({"since": utc_now()}, "SEARCH submitted USING COVERING INDEX ix_job_created_at (created_at>?)"),
        ({"since": utc_now()}, "SEARCH job USING INTEGER PRIMARY KEY (rowid>?)"),
        ({"until": utc_now()}, "SEARCH submitted USING COVERING INDEX ix_job_created_at (created_at<?)"),
        ({"until": utc_now()}, "SEARCH job USING INTEGER PRIMARY KEY (rowid<?)"),
        ({"since": utc_now(), "state": "failed"}, "SEARCH job USING INDEX ix_job_state_id (state=? AND id>?)"),
    ],
)
def test_jobs_are_listed_from_an_index(database: Database, filters: dict[str, Any], step: str) -> None:
    steps = plans(database, lambda: Reading(database).jobs(**filters))
    assert step in steps
    assert not [other for other in steps if "TEMP B-TREE" in other or ("SCAN" in other and filters)]


def test_places_in_the_queue_are_counted_in_an_index(database: Database) -> None:
    steps = plans(database, lambda: Reading(database).places([1, 2]))
    assert any("COVERING INDEX ix_job_claimable" in step for step in steps)
    assert not [step for step in steps if "TEMP B-TREE" in step]


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
    "a job's table": lambda database, job: results.table(database, JobChoice(jobs=[job])),
    "the beginning of a job's table": lambda database, job: results.table(database, JobChoice(jobs=[job]), first=9),
    "a sweep's table": lambda database, _: results.table(database, JobChoice(sweep=1)),
    "the beginning of a sweep's table": lambda database, _: results.table(database, JobChoice(sweep=1), first=9),
    "tables of a job": lambda database, job: results.list_tables(database, job),
}


LISTED = {"(subquery", "job_label", "CONSTANT", "2-ROW", "points"}
"""What may be scanned whole: a list of the statement's own making, as its VALUES of one row or two, or the ids of the
latest job of each point of a sweep."""


@pytest.fixture
def sweep_job(queue: Queue, shop: Any, record: Any) -> int:
    """The id of one of the two jobs of sweep 1, which have succeeded."""
    new = [NewJob(BenchmarkSpec(seed=seed), point={"seed": seed}) for seed in range(2)]
    queue.submit_sweep(None, {}, {}, {"seed": [0, 1]}, [], new)
    claims = []
    for _ in new:
        claims.append(shop.claim())
        queue.finish(claims[-1], Finish("succeeded", measurements=[record()], log="done"))
    return int(claims[0].job_id)


def whole_tables(database: Database, job: int, name: str) -> list[str]:
    """The steps of a reading that look at all rows of a table, whatever the job or the sweep."""
    steps = plans(database, lambda: READS[name](database, job))
    assert steps
    scans = [step for step in steps if step.startswith("SCAN") and "COVERING INDEX" not in step]
    return [step for step in scans if step.split()[1] not in LISTED]


@pytest.mark.parametrize("name", READS)
def test_what_a_job_or_a_sweep_shows_is_found_by_an_index(name: str, database: Database, sweep_job: int) -> None:
    assert not whole_tables(database, sweep_job, name)


@pytest.mark.parametrize("name", [name for name in READS if "table" in name or name in ("measurements", "events")])
def test_measurements_and_events_need_no_sorting(name: str, database: Database, sweep_job: int) -> None:
    """A page of a million would read all of them."""
    steps = plans(database, lambda: READS[name](database, sweep_job))
    orders = [number for number, step in enumerate(steps) if "ORDER BY" in step]
    assert not [number for number in orders if {"measurement", "event"} & set(steps[number - 1].split())]


def test_a_page_of_measurements_reads_no_more_than_its_rows(database: Database, sweep_job: int) -> None:
    steps = plans(database, lambda: Reading(database).measurements(sweep_job, limit=2, after="7"))
    assert "SEARCH measurement USING INDEX ix_measurement_job_id (job_id=? AND rowid>?)" in steps


def test_a_history_reads_the_measurements_of_its_metric_only(database: Database, shop: Any) -> None:
    shop.ran(measurements=[measurement("step_ms", case_key="a case")])
    steps = plans(database, lambda: results.history(database, results.CaseChoice(key="a case")))
    of_rows = "SEARCH measurement USING INDEX ix_measurement_case (case_key=? AND metric=? AND phase=?)"
    assert of_rows in steps
    assert not any(step.startswith("SCAN measurement") for step in steps)
    assert "SEARCH measurement USING COVERING INDEX ix_measurement_case (case_key=?)" in steps
    assert "TEMP B-TREE" not in steps[steps.index(of_rows) + 1], "the newest rows are read, and no others"
