"""Cancels and deletes the jobs that a filter chooses, in slices: ten thousand of them keep no other writer waiting."""

from dataclasses import dataclass

from sqlalchemy import func, select

from app.errors import DatabaseBusy
from app.states import FINISHED_STATES
from app.store import tables
from app.store.database.slices import Slices
from app.store.files.store import FileStore
from app.store.keeping.deleting import DELETABLE, delete_jobs, remove_files
from app.store.queue.transitions import Queue
from app.store.reading.filters import JobFilter

CANCELLED_AT_ONCE = 200
"""Number of jobs that one transaction cancels: a hundredth of a second."""

_job = tables.job.c


@dataclass(frozen=True)
class BulkCancelled:
    """`cancelled`: jobs that were queued; `requested`: running ones that end soon."""

    cancelled: int
    requested: int


@dataclass(frozen=True)
class BulkDeleted:
    """`deleted` counts the deleted jobs. Of the chosen jobs that stay, `unfinished` are queued or running, and
    baselines need those `in_baselines`."""

    deleted: int
    unfinished: int
    in_baselines: int


class Bulk:
    """Changes many jobs of one database. A repeated call continues where an earlier one stopped."""

    def __init__(self, slices: Slices, queue: Queue, files: FileStore) -> None:
        self._slices = slices
        self._queue = queue
        self._files = files

    def cancel(self, chosen: JobFilter) -> BulkCancelled:
        """Cancel the unfinished jobs that the filter chooses, as `Queue.cancel` does; those submitted later stay.

        Raises DatabaseBusy if the server stops meanwhile.
        """
        unfinished = (_job.state == "queued") | ((_job.state == "running") & _job.cancel_requested_at.is_(None))
        query = select(_job.id).where(*chosen.conditions, unfinished).order_by(_job.id)
        with self._slices.database.read() as connection:
            ids = list(connection.execute(query).scalars())
        cancelled = requested = 0
        for start in range(0, len(ids), CANCELLED_AT_ONCE):
            self._check_stopped()
            counts = self._queue.cancel_some(ids[start : start + CANCELLED_AT_ONCE])
            cancelled, requested = cancelled + counts[0], requested + counts[1]
        return BulkCancelled(cancelled, requested)

    def delete(self, chosen: JobFilter) -> BulkDeleted:
        """Delete the finished jobs that the filter chooses, with their results and files.

        Raises DatabaseBusy if the server stops meanwhile.
        """
        deleted = delete_jobs(self._slices, chosen.conditions)
        remove_files(self._slices, self._files, deleted.contents)
        self._check_stopped()
        remaining = select(func.count()).select_from(tables.job)
        with self._slices.database.read() as connection:
            remaining = remaining.where(*chosen.conditions)
            needed = remaining.where(_job.state.in_(FINISHED_STATES), ~DELETABLE)
            unfinished = remaining.where(_job.state.not_in(FINISHED_STATES))
            numbers = [connection.execute(query).scalar_one() for query in (unfinished, needed)]
            return BulkDeleted(deleted.jobs, *numbers)

    def _check_stopped(self) -> None:
        if self._slices.stopped:
            raise DatabaseBusy("The server is stopping: some of the jobs are done, so repeat the request.")
