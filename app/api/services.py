"""The services that routes use; the application's lifespan opens and closes them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, move_on_after
from anyio.to_thread import current_default_thread_limiter, run_sync
from fastapi import Depends, Request
from fastapi.responses import Response

from app.api.changes import Changes
from app.api.guard import Guard
from app.api.notifying import Notifier
from app.errors import STORE_UNAVAILABLE, DatabaseBusy, FlopwatchError
from app.settings import Settings
from app.store.database.engine import Database, open_database
from app.store.database.locking import patience
from app.store.database.slices import Slices
from app.store.files.opening import open_files
from app.store.files.store import FileStore
from app.store.files.uploads import Uploads
from app.store.keeping.baselines import Baselines
from app.store.keeping.bulk import Bulk
from app.store.keeping.pruning import Pruning, Retention
from app.store.queue.lease import Watcher, with_agreed_lease
from app.store.queue.pausing import Pausing
from app.store.queue.registration import Registration, announce_server
from app.store.queue.sharing import Policy, agree
from app.store.queue.transitions import Queue
from app.store.queue.webhooks import Webhooks
from app.store.reading.queries import Reading
from app.store.tokens import Tokens

logger = logging.getLogger(__name__)

NoteError = Callable[[FlopwatchError], None]

TABLES_AT_ONCE = 2
READ_THREADS = 8
"""Number of threads for all other reads. They compute more than they wait, so more would not be faster, and those of
writes would find no connection to PostgreSQL free (see CONNECTIONS)."""
CHECKPOINT_S = 60.0
NOTE_USES_S = 60.0
MAX_LEASE_POLL_S = 5.0
PRUNE_S = 600.0
FIRST_PRUNE_S = 60.0
# A file this young may belong to a job that is about to be recorded.
UNREFERENCED_AGE_S = 3600.0
UNREFERENCED_PERIOD_S = 900.0


THREADS = 8
"""Number of threads for short writes. Only one writes at a time, so more would not be faster."""
LONG_THREADS = 2
"""Number of threads for long writes. The second lets a long request begin while another one runs for minutes."""

Result = TypeVar("Result")


class Writes:
    """Runs the writes of requests in threads of their own: in those of all requests a few dozen that wait for their
    turn at the database would keep reads and health checks waiting, too. Some requests take long, since they delete
    thousands of jobs or validate thousands of specs, and have a few separate threads. It belongs to one event loop."""

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


@dataclass(frozen=True)
class Services:
    """The store's parts for one application."""

    settings: Settings
    database: Database
    queue: Queue
    pausing: Pausing
    registration: Registration
    reading: Reading
    files: FileStore
    uploads: Uploads
    changes: Changes
    writes: Writes
    slices: Slices
    bulk: Bulk
    baselines: Baselines
    access_tokens: Tokens
    webhooks: Webhooks
    guard: Guard
    tables: CapacityLimiter
    """Limits the threads for tables, since a table may take seconds and hundreds of megabytes; other requests have
    their own threads."""


@contextlib.asynccontextmanager
async def running(settings: Settings, note_error: NoteError = lambda _: None) -> AsyncIterator[Services]:
    """Open and migrate the database, run its upkeep, whose errors `note_error` gets, and close it."""
    current_default_thread_limiter().total_tokens = READ_THREADS
    database = await run_sync(open_database, settings)
    try:
        settings = await run_sync(with_agreed_lease, database, settings)
        files = await run_sync(open_files, settings, database)
        await run_sync(announce_server, database)
        policy = Policy(settings.fair_share_half_life_h * 3600, settings.max_running_devices)
        await run_sync(agree, database, policy)
        access_tokens = Tokens(database)
        guard = Guard(settings, access_tokens)
        await guard.reload()
    except BaseException:
        database.close()
        raise
    slices, queue = Slices(database), Queue(database, max_queued=settings.max_queued_jobs)
    services = Services(
        settings=settings,
        database=database,
        queue=queue,
        pausing=Pausing(database),
        registration=Registration(database),
        reading=Reading(database),
        files=files,
        uploads=Uploads(database, files),
        changes=Changes(database),
        writes=Writes(settings.busy_timeout_s),
        slices=slices,
        bulk=Bulk(slices, queue, files),
        baselines=Baselines(database),
        access_tokens=access_tokens,
        webhooks=Webhooks(database),
        guard=guard,
        tables=CapacityLimiter(TABLES_AT_ONCE),
    )
    pruning = Pruning(slices, files, Retention.of(settings))
    watcher = Watcher(services.queue, services.registration, settings.lease_s)
    every = partial(_every, note_error)
    upkeep = [
        asyncio.create_task(Notifier(services.webhooks, settings).run()),
        asyncio.create_task(every(lambda: min(watcher.lease_s / 4, MAX_LEASE_POLL_S), watcher.poll)),
        asyncio.create_task(every(lambda: CHECKPOINT_S, database.checkpoint, first_after_s=CHECKPOINT_S)),
        asyncio.create_task(every(lambda: NOTE_USES_S, services.guard.note_uses, first_after_s=NOTE_USES_S)),
        asyncio.create_task(every(lambda: PRUNE_S, pruning.run, first_after_s=FIRST_PRUNE_S)),
        asyncio.create_task(
            every(lambda: UNREFERENCED_PERIOD_S, lambda: files.remove_unreferenced(database, UNREFERENCED_AGE_S))
        ),
    ]
    try:
        yield services
    finally:
        slices.stop()
        for task in upkeep:
            task.cancel()
        # A cancelled task still waits for its thread, so nothing uses the database after this.
        await asyncio.gather(*upkeep, return_exceptions=True)
        await services.changes.close()
        await _once(note_error, services.guard.note_uses)
        await run_sync(database.close)


async def _every(
    note_error: NoteError, seconds: Callable[[], float], work: Callable[[], Any], *, first_after_s: float = 0.0
) -> None:
    await asyncio.sleep(first_after_s)
    while True:
        await _once(note_error, work)
        await asyncio.sleep(seconds())


async def _once(note_error: NoteError, work: Callable[[], Any]) -> None:
    try:
        await run_sync(work)
    except STORE_UNAVAILABLE as error:
        note_error(error)
        logger.warning("store maintenance postponed until the store is available: %s", error)
    except Exception:  # no error may end the upkeep
        logger.exception("upkeep of the store failed; it will be tried again")


async def current(request: Request) -> Services:
    """Return the running application's services."""
    services: Services = request.app.state.services
    return services


def slow(route: Callable[..., Response]) -> Callable[..., Awaitable[Response]]:
    """Run a route that computes for long in a thread of its own kind, of which there are TABLES_AT_ONCE."""

    @wraps(route)
    async def answer(services: Services, **values: Any) -> Response:
        return await run_sync(partial(route, services=services, **values), limiter=services.tables)

    return answer


CurrentServices = Annotated[Services, Depends(current)]
