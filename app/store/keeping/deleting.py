"""Deletes jobs with everything that belongs to them: single jobs, those that a filter chooses, and those that retention
removes.

A job may have millions of rows, and a filter may choose thousands of jobs, so this goes in slices. A job loses its
attempts first: readers show the results of recorded attempts only, so nobody ever reads a part of them, and `retry`
refuses a job without the attempts that it counts. If the process ends in between, the job is left without results, and
can be deleted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, select

from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.slices import Slices
from app.store.files.artifacts import ArtifactFiles

JOBS_AT_ONCE = 50
ROWS_AT_ONCE = 500
CONTENTS_AT_ONCE = 20

_job, _artifact = tables.job.c, tables.artifact.c

_in_baseline = select(tables.baseline_case.c.job_id)
DELETABLE: ColumnElement[bool] = _job.state.in_(FINISHED_STATES) & _job.id.not_in(_in_baseline)
"""The condition for jobs that may be deleted. Jobs that something else needs are excluded here, and only here."""

_LARGE = (tables.measurement, tables.event, tables.result_table, tables.unit)
"""The tables, beside `artifact`, in which a job may have very many rows. ON DELETE CASCADE empties the others."""


@dataclass(frozen=True)
class Deleted:
    """The number of jobs that were deleted, and the contents to which no artifact refers any more."""

    jobs: int
    contents: list[str]


def delete_jobs(slices: Slices, which: Sequence[ColumnElement[bool]]) -> Deleted:
    """Delete the jobs that match all of `which`, may be deleted and exist by now, oldest first."""
    wanted = [*which, DELETABLE]
    with slices.database.read() as connection:  # looking for them may take long, and needs no lock
        found = list(connection.execute(select(_job.id).where(*wanted).order_by(_job.id)).scalars())
    contents: set[str] = set()
    number = 0
    for start in range(0, len(found), JOBS_AT_ONCE):
        some = _job.id.in_(found[start : start + JOBS_AT_ONCE])

        def step(connection: Connection, some: ColumnElement[bool] = some) -> int:
            nonlocal number
            ids = list(connection.execute(select(_job.id).where(some, *wanted)).scalars())
            if rows := _delete_rows(connection, ids, contents):
                return rows
            gone = connection.execute(delete(tables.job).where(_job.id.in_(ids))).rowcount
            number += gone
            return gone

        slices.run(step)
    return Deleted(number, _unreferred(slices, sorted(contents)))


def _delete_rows(connection: Connection, job_ids: Sequence[int], contents: set[str]) -> int:
    """Delete the jobs' attempts and some hundred of their other rows; returns the number of the other rows, 0 if none
    is left.

    Adds the contents of artifacts that it deletes to `contents`.
    """
    connection.execute(delete(tables.attempt).where(tables.attempt.c.job_id.in_(job_ids)))
    for table in _LARGE:
        some = select(table.c.id).where(table.c.job_id.in_(job_ids)).limit(ROWS_AT_ONCE)
        if number := connection.execute(delete(table).where(table.c.id.in_(some))).rowcount:
            return number
    some = select(_artifact.id).where(_artifact.job_id.in_(job_ids)).limit(ROWS_AT_ONCE)
    query = delete(tables.artifact).where(_artifact.id.in_(some)).returning(_artifact.sha256)
    deleted = list(connection.execute(query).scalars())
    contents.update(deleted)
    return len(deleted)


def _unreferred(slices: Slices, contents: Sequence[str]) -> list[str]:
    found: list[str] = []
    for start in range(0, len(contents), ROWS_AT_ONCE):
        part = contents[start : start + ROWS_AT_ONCE]
        with slices.database.read() as connection:
            kept = set(connection.execute(select(_artifact.sha256).where(_artifact.sha256.in_(part))).scalars())
        found += [sha256 for sha256 in part if sha256 not in kept]
    return found


def remove_files(slices: Slices, files: ArtifactFiles, contents: Sequence[str]) -> int:
    """Remove the files of contents that no artifact refers to; returns their number.

    If the process ends before it has removed all of them, the rest is swept as orphans later (see artifacts.py).
    """
    removed = 0
    for start in range(0, len(contents), CONTENTS_AT_ONCE):
        if slices.stopped:
            break
        removed += len(files.remove(contents[start : start + CONTENTS_AT_ONCE], slices.database))
    return removed
