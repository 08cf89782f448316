"""Wakes the requests that follow a job: event streams and `Prefer: wait`.

One thread polls for all of them; while no request follows a job, there is no polling. When something was committed, the
thread asks once which jobs have new events, and wakes only their followers: each change of a job has an event. No
transaction is open between polls.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from app.errors import STORE_UNAVAILABLE, FlopwatchError
from app.store.database.engine import ChangeWatch, Database
from app.store.reading.queries import Reading

logger = logging.getLogger(__name__)

POLL_S = 0.05


class Followed:
    """A job that at least one request follows. It belongs to one event loop.

    To miss nothing: note `generation`, read the database, then wait with `after(noted)`.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.followers = 0
        self.stopping = False
        self._changed = asyncio.Event()

    async def after(self, generation: int, timeout_s: float) -> bool:
        """Wait until the job has changed since `generation`; returns False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.generation == generation and not self.stopping:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def advance(self) -> None:
        self.generation += 1
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Changes:
    """Reports changes of jobs to the requests that follow them. It belongs to one event loop."""

    def __init__(self, database: Database) -> None:
        self.stopping = False
        self._database = database
        self._reading = Reading(database)
        self._watch: ChangeWatch | None = None
        self._last_event: int | None = None
        """Id of the last event that the poller has seen; None while it has not looked yet."""
        # A watch belongs to one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="changes")
        self._followed: dict[int, Followed] = {}
        self._poller: asyncio.Task[None] | None = None
        self._blind = False
        """True if the last look failed."""

    @contextlib.contextmanager
    def following(self, job_id: int) -> Iterator[Followed]:
        """Follow a job as long as the context lasts."""
        job = self._followed.setdefault(job_id, Followed())
        job.followers += 1
        job.stopping = self.stopping
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_while_followed())
        try:
            yield job
        finally:
            job.followers -= 1
            if not job.followers:
                del self._followed[job_id]

    def wake_all(self) -> None:
        """Let all followers look again: who may follow has changed."""
        self._advance(None)

    def stop(self) -> None:
        """Wake all followers and refuse further waiting: streams end, and their clients resume elsewhere or later."""
        self.stopping = True
        for job in self._followed.values():
            job.stopping = True
            job.wake()

    async def close(self) -> None:
        self.stop()
        if self._poller is not None:
            await self._poller
        self._thread.shutdown()

    async def _poll_while_followed(self) -> None:
        loop = asyncio.get_running_loop()
        # Start again if a request began to follow just as the thread gave up.
        while self._followed and not self.stopping:
            await loop.run_in_executor(self._thread, self._poll, loop)
        self._poller = None

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        # The thread polls, so that the event loop sleeps until there is a change. Waking the loop for every look would
        # cost five times as much.
        self._last_event = None
        while self._followed and not self.stopping:
            changed = self._look()
            if changed is None or changed:
                loop.call_soon_threadsafe(self._advance, changed)
            time.sleep(POLL_S)

    def _advance(self, changed: Collection[int] | None) -> None:
        for job_id in list(self._followed) if changed is None else changed:
            if job_id in self._followed:
                self._followed[job_id].advance()

    def _look(self) -> Collection[int] | None:
        """Return the jobs that changed since the last look; None if that could be any job."""
        try:
            if self._watch is None:
                self._watch = self._database.watch()
            if not self._watch.changed() and self._last_event is not None:
                return ()
            changed, self._last_event = self._reading.changed_jobs(self._last_event)
        except FlopwatchError as error:
            if not self._blind:
                why = f": {error.detail}" if isinstance(error, STORE_UNAVAILABLE) else ""
                logger.warning("cannot see which jobs changed, waking everybody to be safe%s", why, exc_info=not why)
            self._last_event, self._blind = None, True
            return None
        self._blind = False
        return changed
