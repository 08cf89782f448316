"""The one poller that wakes whoever waits for a change, where tests of the routes do not reach."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from app.api.changes import Changes
from app.settings import Settings
from app.store.engine import open_database
from app.store.registration import Registration


def test_who_comes_as_the_poller_gives_up_is_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gave_up, may_return = threading.Event(), threading.Event()
    poll = Changes._poll

    def slow_to_return(changes: Changes, loop: asyncio.AbstractEventLoop) -> None:
        poll(changes, loop)
        gave_up.set()
        assert may_return.wait(10)

    monkeypatch.setattr(Changes, "_poll", slow_to_return)
    database = open_database(Settings(data_dir=tmp_path))

    async def scenario() -> bool:
        changes = Changes(database)
        while not await changes.after(changes.generation, 0.01):  # the first look always tells of a change
            pass
        assert await asyncio.to_thread(gave_up.wait, 10)
        waiting = asyncio.create_task(changes.after(changes.generation, 10))
        await asyncio.sleep(0)  # it waits now, and there is a poller still
        may_return.set()
        await asyncio.to_thread(Registration(database).register_worker, "worker", "host", 1, [], [], [], {})
        try:
            return await waiting
        finally:
            await changes.close()

    try:
        assert asyncio.run(scenario())
    finally:
        database.close()
