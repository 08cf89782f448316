"""The services that routes use; the application's lifespan opens and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Depends, Request

from app.api.changes import Changes
from app.api.writing import Writes
from app.errors import FlopwatchError
from app.settings import Settings
from app.store.artifacts import ArtifactFiles
from app.store.engine import Database, open_database
from app.store.lease import Watcher
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.registration import Registration

logger = logging.getLogger(__name__)

CHECKPOINT_S = 60.0
MAX_LEASE_POLL_S = 5.0
# A file this young may belong to a job that is about to be recorded.
ORPHAN_AGE_S = 3600.0
ORPHAN_SWEEP_S = 900.0


@dataclass(frozen=True)
class Services:
    """The store's parts for one application."""

    settings: Settings
    database: Database
    queue: Queue
    registration: Registration
    reading: Reading
    files: ArtifactFiles
    changes: Changes
    writes: Writes


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Services]:
    """Open the database (migrating it), keep it up while inside, and close it."""
    database = await run_sync(open_database, settings)
    services = Services(
        settings=settings,
        database=database,
        queue=Queue(database),
        registration=Registration(database),
        reading=Reading(database),
        files=ArtifactFiles(settings.artifacts_dir),
        changes=Changes(database),
        writes=Writes(settings.busy_timeout_s),
    )
    watcher = Watcher(services.queue, services.registration, settings.lease_s)
    upkeep = [
        asyncio.create_task(_every(min(settings.lease_s / 4, MAX_LEASE_POLL_S), watcher.poll)),
        asyncio.create_task(_every(CHECKPOINT_S, database.checkpoint, first_after_s=CHECKPOINT_S)),
        asyncio.create_task(_every(ORPHAN_SWEEP_S, lambda: services.files.sweep_orphans(database, ORPHAN_AGE_S))),
    ]
    try:
        yield services
    finally:
        for task in upkeep:
            task.cancel()
        # A cancelled task still waits for its thread, so nothing uses the database after this.
        await asyncio.gather(*upkeep, return_exceptions=True)
        await services.changes.close()
        await run_sync(database.close)


async def _every(seconds: float, work: Callable[[], Any], *, first_after_s: float = 0.0) -> None:
    await asyncio.sleep(first_after_s)
    while True:
        await _once(work)
        await asyncio.sleep(seconds)


async def _once(work: Callable[[], Any]) -> None:
    try:
        await run_sync(work)
    except (FlopwatchError, OSError):
        logger.exception("upkeep of the store failed; it will be tried again")


async def current(request: Request) -> Services:
    """The running application's services."""
    services: Services = request.app.state.services
    return services


CurrentServices = Annotated[Services, Depends(current)]
