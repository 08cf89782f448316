"""Separate threads for requests that write.

A write waits for its turn at the database. If writes ran in the threads of all requests, a few dozen of them would take
every thread, and reads and health checks would wait behind them for a lock that they do not need.

Some requests take long: they delete thousands of jobs in slices, or validate thousands of specs before they write. They
have a few separate threads, so that they cannot take those of all others.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, move_on_after
from anyio.to_thread import run_sync

from app.errors import DatabaseBusy
from app.store.database.locking import patience

THREADS = 8
"""Number of threads for short writes. Only one writes at a time, so more would not be faster."""
LONG_THREADS = 2
"""Number of threads for long writes. The second lets a long request begin while another one runs for minutes."""

Result = TypeVar("Result")


class Writes:
    """Runs the writes of requests in threads. It belongs to one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = CapacityLimiter(THREADS)
        self._long_threads = CapacityLimiter(LONG_THREADS)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Call `work` in a thread, and return what it returns.

        Raises DatabaseBusy if the write could not begin within `timeout_s` seconds, however many others wait.
        """
        return await self._run(work, self._threads, "requests have been waiting to write")

    async def run_long(self, work: Callable[[], Result]) -> Result:
        """Like `run`, for work that may take seconds or minutes: it never takes a thread of `run`."""
        return await self._run(work, self._long_threads, "requests that change many jobs have been at work")

    async def _run(self, work: Callable[[], Result], threads: CapacityLimiter, who: str) -> Result:
        borrower, began = object(), time.monotonic()
        with move_on_after(self._timeout_s) as wait:
            await threads.acquire_on_behalf_of(borrower)
        if wait.cancelled_caught:
            raise DatabaseBusy(f"{threads.total_tokens:g} other {who} for {self._timeout_s:g} s.")
        try:
            with patience(self._timeout_s - (time.monotonic() - began)):
                # This request already has its thread, so it need not wait for the limit that reads share.
                return await run_sync(work, limiter=CapacityLimiter(1))
        finally:
            threads.release_on_behalf_of(borrower)
