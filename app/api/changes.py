"""Wakes the requests that wait for the database to change: event streams and `Prefer: wait`.

One thread polls for all of them, and none does while nobody waits. No transaction is open between polls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from app.errors import FlopwatchError
from app.store.engine import ChangeWatch, Database

logger = logging.getLogger(__name__)

POLL_S = 0.05


class Changes:
    """Counts the changes of a database while somebody waits for one. Lives in one event loop.

    To miss nothing: note `generation`, read the database, then wait with `after(noted)`.
    """

    def __init__(self, database: Database) -> None:
        self.generation = 0
        self.stopping = False
        self._database = database
        self._watch: ChangeWatch | None = None
        # A watch belongs to one thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="changes")
        self._changed = asyncio.Event()
        self._waiting = 0
        self._poller: asyncio.Task[None] | None = None

    async def after(self, generation: int, timeout_s: float) -> bool:
        """Wait until something was committed since `generation`; False when `timeout_s` passed first."""
        self._waiting += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_while_awaited())
        try:
            async with asyncio.timeout(timeout_s):
                while self.generation == generation and not self.stopping:
                    await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def stop(self) -> None:
        """Wake all waiters and let nobody wait again: streams end, and their clients resume elsewhere or later."""
        self.stopping = True
        self._wake()

    async def close(self) -> None:
        self.stop()
        if self._poller is not None:
            await self._poller
        self._thread.shutdown()

    async def _poll_while_awaited(self) -> None:
        loop = asyncio.get_running_loop()
        # Start again if a request began to wait just as the thread gave up.
        while self._waiting and not self.stopping:
            await loop.run_in_executor(self._thread, self._poll, loop)
        self._poller = None

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        # The thread polls, so that the loop sleeps until there is a change. Waking the loop for every look costs five
        # times as much.
        while self._waiting and not self.stopping:
            if self._look():
                loop.call_soon_threadsafe(self._advance)
            time.sleep(POLL_S)

    def _advance(self) -> None:
        self.generation += 1
        self._wake()

    def _look(self) -> bool:
        try:
            if self._watch is None:
                self._watch = self._database.watch()
            return self._watch.changed()
        except FlopwatchError:
            logger.exception("cannot see whether the database changed; waking everybody to be safe")
            return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
