"""Takes protecting mechanisms out of a real server, worker or job process, for controls: a test must fail then.

Python imports this module at start where its folder is on the path. $SABOTAGE names what to take out, separated by
commas; $MOVED_CLOCK names a file with the seconds by which the wall clock is off; $OBJECT_REQUEST_S is how long a
request to an object store may take. The product knows nothing of it.
Every mechanism imports what it needs by itself: most processes of a worker are small. It does so by long names
(`flopwatch.workers`): the processes of units find no others, and would run unharmed.
"""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Put something else in the place of an attribute of a module or class.

    Modules of the product that were imported before (see forkserver.py) may have taken a module's function by name.
    """
    original = getattr(owner, name)  # it must be there still
    setattr(owner, name, replacement)
    if getattr(original, "__module__", None) == getattr(owner, "__name__", ""):
        for module in [*sys.modules.values()]:
            ours = module.__name__.removeprefix("flopwatch.").startswith(("app.", "workers."))
            if ours and vars(module).get(name) is original:
                setattr(module, name, replacement)


def watcher() -> None:
    """Nobody looks for lost workers."""
    from flopwatch.app.store.queue.lease import Watcher

    replace(Watcher, "poll", lambda _self: [])


def last_attempt() -> None:
    """A lost job goes back to the queue however often it was tried."""
    from flopwatch.app.store.queue.transitions import Queue

    original = Queue.recover

    def recover(self: Queue, running: Any) -> str | None:
        with self._database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET max_attempts = attempt + 1 WHERE id = ?", (running.job_id,))
        return original(self, running)

    replace(Queue, "recover", recover)


def monotonic_clock() -> None:
    """A watcher compares the wall clock with the time at which a worker was last seen."""
    from sqlalchemy import select

    from flopwatch.app.store import tables
    from flopwatch.app.store.queue.lease import Watcher
    from flopwatch.app.store.records import RunningAttempt

    attempt, worker = tables.attempt.c, tables.worker.c
    running = select(attempt.id, attempt.job_id, attempt.number, attempt.beat).where(
        attempt.state == "running", attempt.worker_id == worker.id
    )

    def poll(self: Any) -> list[int]:
        limit = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=self.lease_s)
        with self._queue._database.read() as connection:
            lost = [RunningAttempt(*row) for row in connection.execute(running.where(worker.last_seen_at < limit))]
        return [one.job_id for one in lost if self._queue.recover(one) is not None]

    replace(Watcher, "poll", poll)


def atomic_claim() -> None:
    """A worker looks for a job first and takes it a moment later, whatever became of it meanwhile."""
    from flopwatch.app.store.queue import transitions
    from flopwatch.app.store.queue.claims import next_job as original

    seen: list[int] = []

    def next_job(connection: Any, worker_id: str, offer: Any) -> int | None:
        if seen:
            connection.exec_driver_sql("UPDATE job SET state = 'queued' WHERE id = ?", (seen[0],))
            return seen.pop()
        found = original(connection, worker_id, offer)
        if found is not None:
            seen.append(found)
            time.sleep(0.1)  # long enough for another worker to look, too
        return found

    replace(transitions, "next_job", next_job)


def fence() -> None:
    """A claim counts although its attempt was given up."""
    from sqlalchemy import update

    from flopwatch.app.store import tables
    from flopwatch.app.store.queue import fence

    replace(fence, "_RENEW", update(tables.attempt).where(*fence._OF_CLAIM).values(beat=tables.attempt.c.beat + 1))


def transaction() -> None:
    """Every statement of a write is a transaction of its own."""
    from sqlalchemy import event

    from flopwatch.app.store.database.engine import Database

    @contextlib.contextmanager
    def write(self: Database) -> Iterator[Any]:
        with self._translated(), self.backend.write_lock(), self._reader.begin() as connection:
            event.listen(connection, "before_cursor_execute", lambda of, *_: of.connection.driver_connection.commit())
            yield connection

    replace(Database, "write", write)


def write_lock() -> None:
    """Writers do not wait for each other's file lock."""
    from flopwatch.app.store.database.sqlite import SQLite

    replace(SQLite, "write_lock", lambda *_: contextlib.nullcontext())


def lock_deadline() -> None:
    """A write waits for the file lock as long as it takes."""
    from flopwatch.app.store.database.locking import WriteLock

    original = WriteLock.hold
    replace(WriteLock, "hold", lambda self, _timeout_s: original(self, 3600.0))


def error_translation() -> None:
    """The database's errors reach the routes as the driver raises them."""
    from flopwatch.app.store.database.sqlite import SQLite

    replace(SQLite, "translate", lambda *_: None)


def waking_of_streams() -> None:
    """A server that is told to stop says nothing to its streams."""
    from flopwatch.app.api.changes import Changes

    replace(Changes, "stop", lambda _self: None)


def row_before_upload() -> None:
    """An object gets its row, and the claim is checked, after the upload."""
    from sqlalchemy import insert

    from flopwatch.app.store import tables
    from flopwatch.app.store.files import objects

    def put(self: Any, file: Any, expected: int, check: Any, claim: Any) -> tuple[str, int]:
        row = {"name": f"{time.time_ns()}", "attempt_id": claim.attempt_id, "created_at": tables.utc_now()}
        sha256, size = self._upload(row["name"], file, expected, check)
        with self._database.write() as connection:
            objects._check_runs(connection, claim)
            connection.execute(insert(tables.stored_object), {**row, "sha256": sha256, "size": size})
        return sha256, size

    replace(objects.ObjectFiles, "_put", put)


def errors_of_uploads() -> None:
    """An upload that breaks off counts as one that has ended."""
    from flopwatch.app.errors import StoreUnreachable
    from flopwatch.app.store.files import objects

    original = objects.ObjectFiles._upload

    def upload(self: Any, name: str, file: Any, expected: int, check: Any) -> tuple[str, int]:
        try:
            return original(self, name, file, expected, check)
        except StoreUnreachable:
            file.seek(0)
            return hashlib.sha256(file.read()).hexdigest(), expected

    replace(objects.ObjectFiles, "_upload", upload)


def found_allocations() -> None:
    """A worker takes no notice of allocations whose submission was not answered."""
    from flopwatch.workers.slurm.allocations import Allocations

    original = Allocations._judge

    def judge(self: Any, allocation: Any, listed: Any) -> None:
        original(self, allocation, None if allocation.unanswered else listed)

    replace(Allocations, "_judge", judge)


def settling() -> None:
    """An agent in an allocation takes the effects of a signal to all its processes for a failure of the job.

    It hears of the signal half a second after the job, as it may: else chance says who is first.
    """
    import threading

    from flopwatch.workers.slurm.one_job import OneJobAgent

    original = OneJobAgent.drain
    replace(OneJobAgent, "_settle_s", 0.0)
    replace(OneJobAgent, "drain", lambda self: threading.Timer(0.5, original, (self,)).start())


def scancel() -> None:
    """A worker does not cancel allocations that nobody needs."""
    from flopwatch.workers.slurm.client import SlurmClient

    replace(SlurmClient, "cancel", lambda *_: None)


def cancel_of_queued() -> None:
    """A cancel is a mere wish, also of a job that waits."""
    from flopwatch.app.store.public import job_dict
    from flopwatch.app.store.queue.transitions import Queue, _job_row

    def cancel(self: Queue, job_id: int) -> dict[str, Any]:
        with self._database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET cancel_requested_at = created_at WHERE id = ?", (job_id,))
            return job_dict(_job_row(connection, job_id)._mapping, waiting=None)

    replace(Queue, "cancel", cancel)


def subreaper() -> None:
    """Orphans go to init."""
    from flopwatch.workers.processes import linux

    replace(linux, "adopt_orphans", lambda: None)


def kill_after_terminate() -> None:
    """A job that is to end is only asked to."""
    from flopwatch.workers.processes.launch import Process

    replace(Process, "kill", lambda _self: None)
    replace(Process, "kill_with_keeper", lambda _self: True)


def watched_pipe() -> None:
    """A keeper does not notice the end of its agent."""
    from flopwatch.workers.processes import keeper

    original = keeper._receive

    def receive(control: Any) -> bytes:
        order = original(control)
        if not order:
            time.sleep(3600)
        return order

    replace(keeper, "_receive", receive)


def capped_log() -> None:
    """All output is kept."""
    from flopwatch.workers.agent import log

    original = log.CappedLog.__init__
    endless = 1 << 40
    replace(log.CappedLog, "__init__", lambda self: original(self, endless, endless, endless))


def move_clock(file: Path) -> None:
    """Let the wall clock be off by the seconds that the file says, from the moment it says so."""
    true_time = time.time

    def offset_s() -> float:
        try:
            return float(file.read_text() or 0)
        except FileNotFoundError:
            return 0.0

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(seconds=offset_s())

    replace(time, "time", lambda: true_time() + offset_s())
    replace(time, "time_ns", lambda: int(time.time() * 1e9))
    if not {"warm", "keeper", "child", "wrapped"} & set(sys.orig_argv):  # they use no database, and start often
        from flopwatch.text import times

        replace(times, "datetime", Moved)


def limit_object_requests(seconds: int) -> None:
    """Let requests to an object store fail after so many seconds."""
    from flopwatch.app.store.files import objects

    replace(objects, "REQUEST_S", seconds)


for name in filter(None, os.environ.get("SABOTAGE", "").split(",")):
    globals()[name]()
if clock := os.environ.get("MOVED_CLOCK"):
    move_clock(Path(clock))
if seconds := os.environ.get("OBJECT_REQUEST_S"):
    limit_object_requests(int(seconds))

import light_warm_parent  # noqa: E402, F401 - it imports what is sabotaged above
