"""Many jobs at once: copies of a real one, written straight into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from app.store import tables
from app.store.engine import Database

BATCH = 1000
"""Copies in one transaction, so that nobody who writes beside us waits for long."""
BELONGINGS = (tables.attempt, tables.event, tables.measurement)

Change = Callable[[int], dict[str, Any]]


def copy_job(database: Database, job_id: int, copies: int, change: Change, *, measured_every: int = 1) -> range:
    """Copy a job with its labels, attempts and events, and its measurements for every `measured_every`th copy.

    `change` tells the columns of the table `job` in which the copy of that id differs; all other columns, times
    included, are the original's. Returns the ids of the copies.
    """
    with database.read() as connection:
        row = connection.execute(select(tables.job).where(tables.job.c.id == job_id)).mappings().one()
        belongings = {table: _belonging_to(connection, job_id, table) for table in BELONGINGS}
        last = connection.execute(select(tables.job.c.id).order_by(tables.job.c.id.desc()).limit(1)).scalar_one()
    ids = range(last + 1, last + 1 + copies)
    for start in range(0, copies, BATCH):
        batch = ids[start : start + BATCH]
        with database.write() as connection:
            jobs = [{**row, "id": copy, **change(copy)} for copy in batch]
            _insert(connection, tables.job, jobs)
            _insert(connection, tables.job_label, list(_labels(jobs)))
            for table, rows in belongings.items():
                owners = batch[::measured_every] if table is tables.measurement else batch
                _insert(connection, table, [{**one, "job_id": owner} for owner in owners for one in rows])
    database.checkpoint()
    return ids


def _belonging_to(connection: Connection, job_id: int, table: Table) -> list[dict[str, Any]]:
    rows = connection.execute(select(table).where(table.c.job_id == job_id).order_by(table.c.id)).mappings()
    return [{name: value for name, value in row.items() if name != "id"} for row in rows]


def _labels(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for job in jobs:
        for key, value in job["labels"].items():
            yield {"job_id": job["id"], "key": key, "value": value}


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)
