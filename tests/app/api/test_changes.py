"""The one poller that wakes whoever follows a job, where tests of the routes do not reach."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.api.changes import Changes
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import NewJob
from tools.waiting import wait_until

TIMEOUT_S = 10.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(Settings(data_dir=tmp_path))
    yield opened
    opened.close()


def submit(database: Database) -> int:
    return int(Queue(database).submit(NewJob(BenchmarkSpec.example())).response["id"])


def run(database: Database, scenario: Callable[[Changes], Awaitable[None]]) -> None:
    async def main() -> None:
        changes = Changes(database)
        try:
            await scenario(changes)
        finally:
            await changes.close()

    asyncio.run(main())


def count_looks(changes: Changes) -> list[Any]:
    """What each of the poller's looks from now on has found, as it finds it."""
    looks: list[Any] = []
    look = changes._look

    def counted() -> Any:
        looks.append(look())
        return looks[-1]

    changes._look = counted  # type: ignore[method-assign]
    return looks


def wait_for_looks(looks: list[Any], count: int) -> None:
    wait_until(lambda: len(looks) >= count, timeout_s=TIMEOUT_S, what=f"{count} looks")


def test_a_commit_wakes_the_followers_of_its_job_only(database: Database) -> None:
    """Not jobs of others, a readiness check, or an event of another job."""

    async def scenario(changes: Changes) -> None:
        looks = count_looks(changes)
        mine, other = submit(database), submit(database)
        with changes.following(mine) as followed, changes.following(other) as last:
            assert await followed.after(0, TIMEOUT_S), "the first look tells that anything may have changed"
            before, seen = followed.generation, last.generation
            for _ in range(3):
                submit(database)
                database.probe(1.0)
                # The first look may have begun before, the second sees the commit, and wakes before the third one.
                await asyncio.to_thread(wait_for_looks, looks, len(looks) + 3)
            Queue(database).cancel(other)
            assert await last.after(seen, TIMEOUT_S), "its own event wakes"
            assert followed.generation == before

    run(database, scenario)


def test_a_follower_that_comes_as_polling_ends_is_woken(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    gave_up, may_return = threading.Event(), threading.Event()
    poll = Changes._poll

    def slow_to_return(changes: Changes, loop: asyncio.AbstractEventLoop) -> None:
        poll(changes, loop)
        gave_up.set()
        assert may_return.wait(TIMEOUT_S)

    monkeypatch.setattr(Changes, "_poll", slow_to_return)
    job_id = submit(database)

    async def scenario(changes: Changes) -> None:
        with changes.following(job_id) as followed:
            assert await followed.after(0, TIMEOUT_S)
        assert await asyncio.to_thread(gave_up.wait, TIMEOUT_S)
        with changes.following(job_id) as followed:  # there is a poller still
            may_return.set()
            assert await followed.after(0, TIMEOUT_S)
            seen = followed.generation
            await asyncio.to_thread(Queue(database).cancel, job_id)
            assert await followed.after(seen, TIMEOUT_S)

    run(database, scenario)


def test_events_that_were_removed_hide_no_later_ones(database: Database) -> None:
    reading, first = Reading(database), submit(database)
    _, last = reading.changed_jobs(None)
    Queue(database).cancel(first)
    with database.write() as connection:
        connection.exec_driver_sql("delete from event")
    assert reading.changed_jobs(last) == (set(), last)
    second = submit(database)
    changed, _ = reading.changed_jobs(last)
    assert changed == {second}
