"""Retention: deletes data that would grow without bound and that nobody needs any more. The server does so by itself,
in slices.

- Rows of workers that stopped or were lost, and of their hosts: after 30 days. More than KEPT_WORKERS such
  rows are never kept.
- Progress and log events of finished jobs: after `keep_events_days`. A log that is stored nowhere else stays.
- First answers to requests with an Idempotency-Key: after 30 days.
- Uploaded code that no job names: after KEEP_UNUSED_CODE.
- Jobs whose deletion has begun and was not completed (see deleting.py).
- Finished jobs with results and files, and sweeps that have no job left: after `keep_jobs_days`, if that is set.

Ages are computed from the wall clock.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, Select, delete, func, or_, select, tuple_

from app.settings import Settings
from app.store import tables
from app.store.database.slices import Slices
from app.store.files.store import FileStore
from app.store.keeping.deleting import DELETABLE, complete_deletions, delete_jobs, remove_files
from app.store.queue.hosts import known_host
from app.store.queue.registration import ALIVE
from app.store.tables import utc_now

logger = logging.getLogger(__name__)

KEPT_WORKERS = 1000
"""Largest number of rows of workers that are gone: a service that starts a failing agent every second makes 86 400 a
day."""
ROWS_AT_ONCE = 500
JOBS_AT_ONCE = 200
KEEP_UNUSED_CODE = timedelta(days=1)
"""Clients name an uploaded file in a job within minutes of uploading it."""

_job, _event, _attempt = tables.job.c, tables.event.c, tables.attempt.c
_worker, _key, _sweep = tables.worker.c, tables.idempotency_key.c, tables.sweep.c


@dataclass(frozen=True)
class Retention:
    """The times for which data is kept; `jobs` is None if finished jobs are kept for ever."""

    events: timedelta
    jobs: timedelta | None
    workers: timedelta = timedelta(days=30)
    keys: timedelta = timedelta(days=30)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        jobs = settings.keep_jobs_days
        return cls(timedelta(days=settings.keep_events_days), None if jobs is None else timedelta(days=jobs))


@dataclass(frozen=True)
class Pruned:
    """The numbers of rows that were deleted, or would be."""

    workers: int
    events: int
    keys: int
    jobs: int
    sweeps: int
    code_files: int
    pages: int
    """Free pages of the database, cut off its file."""

    def in_words(self) -> str:
        """Return the numbers as a sentence without its verb."""
        return (
            f"{self.jobs} jobs, {self.sweeps} sweeps, {self.events} events of finished jobs, "
            f"{self.keys} idempotency keys, {self.workers} workers, {self.code_files} uploaded files, "
            f"{self.pages} free pages"
        )


class Pruning:
    """Applies one retention to one database. Only one thread may use it."""

    def __init__(
        self, slices: Slices, files: FileStore, retention: Retention, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._slices = slices
        self._files = files
        self._retention = retention
        self._clock = clock
        self._looked_at: tuple[datetime, int] | None = None
        """Finish and id of the last job whose events were looked at: jobs end in this order."""

    def run(self) -> Pruned:
        """Prune until nothing is left to delete, or the slices are stopped; returns the numbers of deleted rows."""
        now = self._clock()
        # The jobs first, so that their events are not looked at by themselves.
        completed = complete_deletions(self._slices)
        remove_files(self._slices, self._files, completed.contents)
        jobs, sweeps = completed.jobs, 0
        if self._retention.jobs is not None:
            deleted = delete_jobs(self._slices, [_finished_before(now - self._retention.jobs)])
            remove_files(self._slices, self._files, deleted.contents)
            jobs, sweeps = jobs + deleted.jobs, self._delete(_old_sweeps(now - self._retention.jobs))
        database = self._slices.database
        pruned = Pruned(
            workers=self._delete(_old_workers(now - self._retention.workers)),
            events=self._prune_events(now - self._retention.events),
            keys=self._delete(_old_keys(now - self._retention.keys)),
            jobs=jobs,
            sweeps=sweeps,
            code_files=self._prune_unused_code(now - KEEP_UNUSED_CODE),
            # Last, when everything else has been deleted.
            pages=self._slices.run(database.backend.cut_pages),
        )
        self._slices.run(lambda connection: _delete_old_hosts(connection, now - self._retention.workers))
        if any(asdict(pruned).values()):
            logger.info("pruned %s", pruned)
        return pruned

    def plan(self) -> Pruned:
        """Count what `run` would delete now, without changing anything."""
        now, keep, backend = self._clock(), self._retention, self._slices.database.backend
        with self._slices.database.read() as connection:

            def count(query: Select[Any]) -> int:
                return connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()

            jobs = _job.deleting if keep.jobs is None else _job.deleting | _finished_before(now - keep.jobs)
            events = 0
            for job_ids, _ in _finished_batches(connection, now - keep.events, None):
                doomed = select(_job.id).where(_job.id.in_(job_ids), jobs, DELETABLE)
                spared = connection.execute(doomed).scalars().all()
                events += count(_unneeded_events(sorted(set(job_ids) - set(spared))))
            return Pruned(
                workers=count(_old_workers(now - keep.workers)),
                events=events,
                keys=count(_old_keys(now - keep.keys)),
                jobs=count(select(_job.id).where(jobs, DELETABLE)),
                sweeps=0 if keep.jobs is None else count(_old_sweeps(now - keep.jobs, but=jobs)),
                code_files=count(_unused_code(now - KEEP_UNUSED_CODE)),
                pages=backend.spare_pages(connection),
            )

    def _delete(self, which: Select[Any]) -> int:
        """Delete the rows of a table whose primary keys `which` selects; returns their number."""
        keys = list(which.selected_columns)
        table = keys[0].table
        some = tuple_(*table.primary_key.columns).in_(which.limit(ROWS_AT_ONCE))
        return self._slices.run(lambda connection: connection.execute(delete(table).where(some)).rowcount)

    def _prune_unused_code(self, before: datetime) -> int:
        which = _unused_code(before)
        with self._slices.database.read() as connection:
            contents = list(connection.execute(which).scalars())
        number = self._delete(which) if contents else 0
        remove_files(self._slices, self._files, contents)
        return number

    def _prune_events(self, before: datetime) -> int:
        number = 0
        while not self._slices.stopped:
            with self._slices.database.read() as connection:
                job_ids, last = next(_finished_batches(connection, before, self._looked_at), ([], None))
                which = _unneeded_events(job_ids).limit(ROWS_AT_ONCE)
                has_some = connection.execute(which.limit(1)).first() is not None
            if last is None:
                break
            if has_some:
                number += self._delete_events(which)
            if not self._slices.stopped:
                self._looked_at = last
        return number

    def _delete_events(self, which: Select[Any]) -> int:
        some = delete(tables.event).where(_event.id.in_(which))
        return self._slices.run(lambda connection: connection.execute(some).rowcount)


def _finished_before(before: datetime) -> ColumnElement[bool]:
    return _job.finished_at < before


def _old_sweeps(before: datetime, but: ColumnElement[bool] | None = None) -> Select[Any]:
    """Select old sweeps without a job; jobs that match `but` and may be deleted do not count."""
    members = select(_job.id).where(_job.sweep_id == _sweep.id)
    if but is not None:
        members = members.where(~(but & DELETABLE) | _job.finished_at.is_(None))
    return select(_sweep.id).where(_sweep.created_at < before, ~members.exists())


def _old_workers(before: datetime) -> Select[Any]:
    gone = _worker.state.not_in(ALIVE)
    newest = select(_worker.id).where(gone).order_by(_worker.registered_at.desc(), _worker.id.desc())
    return select(_worker.id).where(
        gone, or_(_worker.last_seen_at < before, _worker.id.not_in(newest.limit(KEPT_WORKERS)))
    )


def _unused_code(before: datetime) -> Select[Any]:
    code, used = tables.code_file.c, select(tables.job_code.c.sha256)
    return select(code.sha256).where(code.put_at < before, code.sha256.not_in(used))


def _old_keys(before: datetime) -> Select[Any]:
    return select(_key.key, _key.route).where(_key.created_at < before)


def _delete_old_hosts(connection: Connection, before: datetime) -> int:
    """Delete the hosts with which no worker has registered since, and no living worker ever."""
    alive = connection.execute(
        select(_worker.kinds, _worker.capabilities, _worker.devices).where(_worker.state.in_(ALIVE))
    )
    needed = {known_host(*row)["key"] for row in alive}
    host = tables.known_host.c
    old = connection.execute(select(host.key).where(host.last_seen_at < before)).scalars()
    forgotten = list(set(old) - needed)[:ROWS_AT_ONCE]
    return connection.execute(delete(tables.known_host).where(host.key.in_(forgotten))).rowcount if forgotten else 0


def _finished_batches(
    connection: Connection, before: datetime, after: tuple[datetime, int] | None
) -> Iterator[tuple[list[int], tuple[datetime, int]]]:
    """Yield the ids of finished jobs in the order in which they ended, in batches, each with its last job's place."""
    query = select(_job.id, _job.finished_at).where(_finished_before(before), DELETABLE)
    while True:
        place = tuple_(_job.finished_at, _job.id)
        following = query if after is None else query.where(place > after)
        rows = connection.execute(following.order_by(_job.finished_at, _job.id).limit(JOBS_AT_ONCE)).all()
        if not rows:
            return
        after = (rows[-1].finished_at, rows[-1].id)
        yield [row.id for row in rows], after


def _unneeded_events(job_ids: list[int]) -> Select[Any]:
    """Select the events of these finished jobs that nobody needs any more: progress, and logs that are stored
    elsewhere. If an attempt ended without recording its log, as that of a lost worker does, its events are the only
    log. Attempts that were given back have the number of the next one, whose log is then the one that counts."""
    of_jobs = _attempt.job_id.in_(job_ids)
    last = select(func.max(_attempt.id)).where(of_jobs).group_by(_attempt.job_id, _attempt.number)
    with_log = select(_attempt.job_id, _attempt.number).where(_attempt.id.in_(last), _attempt.log.is_not(None))
    kept_elsewhere = (_event.type == "log") & tuple_(_event.job_id, _event.attempt).in_(with_log)
    return select(_event.id).where(_event.job_id.in_(job_ids), (_event.type == "progress") | kept_elsewhere)
