"""Deletes jobs with everything that belongs to them: single jobs, those that a filter chooses, and those that retention
removes.

A job may have millions of rows, and a filter may choose thousands of jobs, so this goes in slices. The first one marks
a job as being deleted, and deletes its attempts: readers show the results of recorded attempts only, so nobody ever
reads a part of them, and `retry` refuses such a job. If the process ends in between, `Pruning.run` completes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, select, update

from app.errors import Conflict, InBaseline
from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.engine import Database
from app.store.database.slices import Slices
from app.store.files.store import FileStore
from app.store.keeping.baselines import baselines_of
from app.store.public import checked_id, row_of

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


def delete_job(database: Database, job_id: int) -> list[str]:
    """Delete a finished job with everything that belongs to it; returns the hashes of the contents that no artifact
    refers to any more, for FileStore.remove. Raises NotFound; Conflict when it is not finished; InBaseline."""
    deleted = delete_jobs(Slices(database), [_job.id == checked_id(job_id, "job")])
    if not deleted.jobs:
        with database.read() as connection:
            state = row_of(connection, tables.job, job_id).state
            if names := baselines_of(connection, job_id):
                raise InBaseline(job_id, names)
            raise Conflict(f"Job {job_id} is {state}: cancel it first.")
    return deleted.contents


def delete_jobs(slices: Slices, which: Sequence[ColumnElement[bool]]) -> Deleted:
    """Delete the jobs that match all of `which`, may be deleted and exist by now, oldest first."""
    wanted = [*which, DELETABLE]
    with slices.database.read() as connection:  # looking for them may take long, and needs no lock
        ids = list(connection.execute(select(_job.id).where(*wanted).order_by(_job.id)).scalars())
    contents: set[str] = set()
    number = 0
    for start in range(0, len(ids), JOBS_AT_ONCE):
        some = _job.id.in_(ids[start : start + JOBS_AT_ONCE])

        def step(connection: Connection, some: ColumnElement[bool] = some) -> int:
            nonlocal number
            ids = list(connection.execute(select(_job.id).where(some, *wanted)).scalars())
            if rows := _delete_rows(connection, ids, contents):
                return rows
            gone = connection.execute(delete(tables.job).where(_job.id.in_(ids))).rowcount
            number += gone
            return gone

        slices.run(step)
    return Deleted(number, _unreferenced(slices, sorted(contents)))


def complete_deletions(slices: Slices) -> Deleted:
    """Delete the jobs whose deletion has begun and was not completed, since its process ended."""
    with slices.database.read() as connection:  # nearly always there are none
        begun = list(connection.execute(select(_job.id).where(tables.IS_BEING_DELETED)).scalars())
    return delete_jobs(slices, [_job.id.in_(begun)]) if begun else Deleted(0, [])


def _delete_rows(connection: Connection, job_ids: Sequence[int], contents: set[str]) -> int:
    """Mark the jobs, and delete their attempts and some hundred of their other rows. Returns the number of the other
    rows, 0 if none is left. Adds the contents of artifacts that it deletes to `contents`."""
    connection.execute(update(tables.job).where(_job.id.in_(job_ids), ~_job.deleting).values(deleting=True))
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


def _unreferenced(slices: Slices, contents: Sequence[str]) -> list[str]:
    unreferenced: list[str] = []
    for start in range(0, len(contents), ROWS_AT_ONCE):
        part = contents[start : start + ROWS_AT_ONCE]
        with slices.database.read() as connection:
            kept = set(connection.execute(select(_artifact.sha256).where(_artifact.sha256.in_(part))).scalars())
        unreferenced += [sha256 for sha256 in part if sha256 not in kept]
    return unreferenced


def remove_files(slices: Slices, files: FileStore, contents: Sequence[str]) -> int:
    """Remove the files of contents that no artifact refers to; returns their number.

    If the process ends before it has removed all of them, FileStore.remove_unreferenced removes the rest later.
    """
    removed = 0
    for start in range(0, len(contents), CONTENTS_AT_ONCE):
        if slices.stopped:
            break
        removed += len(files.remove(contents[start : start + CONTENTS_AT_ONCE], slices.database))
    return removed
