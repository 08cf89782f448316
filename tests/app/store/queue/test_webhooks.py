"""Rows of webhooks, and the numbers that only grow, on both engines."""

from typing import Any

import pytest
from sqlalchemy import select

from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.queue import webhooks
from app.store.queue.transitions import Queue
from app.store.queue.webhooks import Webhooks
from app.store.reading import monitoring
from app.store.records import Finish, NewJob

URL = "https://example.org/hook"


@pytest.fixture
def hooks(database: Database) -> Webhooks:
    return Webhooks(database)


def row(database: Database, job: int) -> Any:
    with database.read() as connection:
        return connection.execute(select(tables.webhook).where(tables.webhook.c.job_id == job)).one()


def test_a_jobs_end_is_begun_once(hooks, shop, queue, database, monkeypatch) -> None:
    job = shop.submit(notify_url=URL)
    shop.submit()
    claim = shop.claim()
    assert claim.job_id == job
    assert hooks.begin() == []
    queue.finish(claim, Finish("succeeded"))
    (begun,) = hooks.begin()
    assert (begun.url, begun.tries, begun.message["data"]["state"]) == (URL, 0, "succeeded")
    assert hooks.begin() == [], "it is another server's for a while"
    with monkeypatch.context() as patched:
        patched.setattr(webhooks, "_WAITING", select(tables.webhook.c.id))
        assert hooks.begin() == [], "nor if this one saw before that it waits"
    hooks.end(begun, delivered=False)
    tried = row(database, job)
    assert (tried.state, tried.tries) == ("pending", 1)
    assert tried.due_at is not None
    hooks.end(begun, delivered=True)
    assert row(database, job).state == "delivered"


def test_control_of_the_turns(hooks: Webhooks, shop: Any, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the row's new time, a second server begins what the first has begun."""
    monkeypatch.setattr(webhooks, "TRY_S", -1.0)
    shop.submit(notify_url=URL)
    queue.finish(shop.claim(), Finish("succeeded"))
    assert len(hooks.begin()) == len(hooks.begin()) == 1


def test_a_late_end_of_a_try_changes_nothing_of_the_next_message(hooks, shop, queue, database) -> None:
    job = shop.submit(notify_url=URL)
    queue.cancel(job)
    (begun,) = hooks.begin()
    queue.retry(job)
    hooks.end(begun, delivered=True)
    assert row(database, job).state == "waiting"


def test_a_sweep_ends_with_its_last_job(hooks: Webhooks, queue: Queue) -> None:
    jobs = [NewJob(BenchmarkSpec(seed=seed), point={"seed": seed}) for seed in (1, 2)]
    grid = {"seed": [0, 1, 2]}
    sweep = queue.submit_sweep("s", {}, {"kind": "benchmark"}, grid, [], jobs, notify_url=URL).response["id"]
    queue.cancel(1)
    assert hooks.begin() == []
    queue.cancel(2)
    (begun,) = hooks.begin()
    assert (begun.message["type"], begun.message["data"]["id"]) == ("sweep.finished", sweep)
    assert begun.message["data"]["counts"] == {"cancelled": 2}
    other = queue.submit_sweep("t", {}, {"kind": "benchmark"}, grid, [], jobs, notify_url=URL).response["id"]
    queue.cancel_sweep(other)
    (told,) = hooks.begin()
    hooks.end(told, delivered=True)
    queue.retry(2)
    hooks.end(begun, delivered=False)
    assert hooks.begin() == [], "a job of the one runs again, and nothing of the other has"
    queue.cancel(2)
    (again,) = hooks.begin()
    assert (again.message["data"]["id"], again.tries) == (sweep, 0)
    assert again.message_id != begun.message_id


def test_numbers_only_grow(shop: Any, queue: Queue, database: Database) -> None:
    for _ in range(3):
        shop.submit()
    queue.finish(shop.claim(), Finish("succeeded"))
    shop.claim()
    queue.cancel_some([3])
    now = monitoring.read(database)
    assert now.tallies == {
        "claims": [("benchmark", "", 2)],
        "outcomes": [("benchmark", "cancelled", 1), ("benchmark", "succeeded", 1)],
    }
    assert (now.jobs["running"], now.oldest_s["queued"]) == (1, 0.0)
    assert now.oldest_s["running"] > 0
