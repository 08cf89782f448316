"""Lists are answered from an index, also with a hundred thousand jobs: what SQLite means to do with each statement."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event as events

from app.store.engine import Database
from app.store.reading import Reading


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
