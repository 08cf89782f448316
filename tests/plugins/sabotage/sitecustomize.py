"""Takes protecting mechanisms out of a real server, worker or job process, for controls: a test must fail then.

Python imports this module at start where its folder is on the path. $SABOTAGE names what to take out, separated by
commas; $MOVED_CLOCK names a file with the seconds by which the wall clock is off; $OBJECT_REQUEST_S is how long a
request to an object store may take. The product knows nothing of it.
Every mechanism imports what it needs by itself: most processes of a worker are small. It does so by long names
(`flopwatch.workers`): the processes of units find no others, and would run unharmed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
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
    """Every claim counts for ever."""
    from flopwatch.app.store.queue import fence

    replace(fence, "renew", lambda _connection, _claim: True)


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


MECHANISMS = {one.__name__: one for one in (watcher, atomic_claim, fence, transaction, write_lock)}

for name in filter(None, os.environ.get("SABOTAGE", "").split(",")):
    MECHANISMS[name]()
if clock := os.environ.get("MOVED_CLOCK"):
    move_clock(Path(clock))
if seconds := os.environ.get("OBJECT_REQUEST_S"):
    limit_object_requests(int(seconds))

import light_warm_parent  # noqa: E402, F401 - it imports what is sabotaged above
