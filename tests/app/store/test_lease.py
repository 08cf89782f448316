from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.errors import LeaseLost
from app.states import LivingState
from app.store import queue as queue_module
from app.store import registration as registration_module
from app.store.lease import Watcher
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import Finish
from app.store.registration import Registration

LEASE_S = 30.0


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watcher(queue: Queue, registration: Registration, clock: Clock) -> Watcher:
    return Watcher(queue, registration, LEASE_S, clock)


def pass_time(
    watcher: Watcher, clock: Clock, seconds: float, meanwhile: Callable[[], object] = lambda: None
) -> list[int]:
    """Poll every second for so long."""
    recovered = []
    for _ in range(round(seconds)):
        clock.now += 1
        meanwhile()
        recovered += watcher.poll()
    return recovered


def test_a_silent_attempt_is_recovered_after_its_lease_and_not_before(
    shop: Any, watcher: Watcher, clock: Clock, queue: Queue, reading: Reading
) -> None:
    claim = shop.running_job()
    assert watcher.poll() == []
    assert pass_time(watcher, clock, LEASE_S) == []
    assert pass_time(watcher, clock, 1) == [claim.job_id]
    assert reading.job(claim.job_id)[0]["state"] == "queued"
    with pytest.raises(LeaseLost):
        queue.finish(claim, Finish("succeeded"))
    assert pass_time(watcher, clock, 100) == []


def test_a_beat_starts_the_lease_anew(shop: Any, watcher: Watcher, clock: Clock, queue: Queue) -> None:
    claim = shop.running_job()
    for _ in range(5):
        assert pass_time(watcher, clock, LEASE_S - 2) == []
        queue.renew([claim])
    assert pass_time(watcher, clock, LEASE_S + 5) == [claim.job_id]


def test_the_second_attempt_has_a_lease_of_its_own(shop: Any, watcher: Watcher, clock: Clock, reading: Reading) -> None:
    first = shop.running_job(max_attempts=2)
    assert pass_time(watcher, clock, LEASE_S + 2) == [first.job_id]
    shop.claim("w2")
    assert pass_time(watcher, clock, LEASE_S - 2) == []
    assert pass_time(watcher, clock, 5) == [first.job_id]
    assert reading.job(first.job_id)[0]["error"]["code"] == "worker_lost"


def test_a_watcher_that_was_stopped_expires_nobody_when_it_wakes(
    shop: Any, watcher: Watcher, clock: Clock, queue: Queue, reading: Reading
) -> None:
    claim = shop.running_job()
    pass_time(watcher, clock, 5)
    clock.now += 3600
    assert watcher.poll() == []
    queue.renew([claim])
    assert pass_time(watcher, clock, LEASE_S - 2) == []
    assert reading.job(claim.job_id)[0]["state"] == "running"
    # One that is silent for good is found all the same.
    assert pass_time(watcher, clock, 5) == [claim.job_id]


def test_a_new_watcher_gives_everybody_a_whole_lease(
    shop: Any, queue: Queue, registration: Registration, clock: Clock
) -> None:
    claim = shop.running_job()
    clock.now += 3600
    restarted = Watcher(queue, registration, LEASE_S, clock)
    assert pass_time(restarted, clock, LEASE_S) == []
    assert pass_time(restarted, clock, 2) == [claim.job_id]


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1), timedelta(days=4000)])
def test_a_jump_of_the_wall_clock_expires_nothing(
    shop: Any,
    watcher: Watcher,
    clock: Clock,
    queue: Queue,
    registration: Registration,
    reading: Reading,
    jump: timedelta,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop.register()
    claim = shop.running_job()
    pass_time(watcher, clock, 5)
    for module in (queue_module, registration_module):
        monkeypatch.setattr(module, "utc_now", lambda: datetime.now(UTC) + jump)
    assert pass_time(watcher, clock, LEASE_S - 7) == []
    queue.renew([claim])
    registration.beat_worker("worker", "active")
    assert pass_time(watcher, clock, LEASE_S - 2) == []
    assert reading.workers()[0]["state"] == "active"
    assert queue.finish(claim, Finish("succeeded")) == "succeeded"


def test_a_job_that_ended_is_forgotten(shop: Any, watcher: Watcher, clock: Clock, queue: Queue) -> None:
    claim = shop.running_job()
    pass_time(watcher, clock, LEASE_S - 2)
    queue.finish(claim, Finish("succeeded"))
    assert pass_time(watcher, clock, 100) == []


def test_two_watchers_recover_a_job_once(
    shop: Any, queue: Queue, registration: Registration, clock: Clock, reading: Reading
) -> None:
    claim = shop.running_job(max_attempts=3)
    watchers = [Watcher(queue, registration, LEASE_S, clock) for _ in range(2)]
    recovered = []
    for _ in range(round(LEASE_S) + 2):
        clock.now += 1
        recovered += [job_id for watcher in watchers for job_id in watcher.poll()]
    assert recovered == [claim.job_id]
    assert reading.job(claim.job_id)[0]["attempt"] == 1


class TestWorkers:
    @pytest.mark.parametrize("state", ["active", "draining"])
    def test_a_silent_worker_is_lost_and_comes_back_as_what_it_was(
        self,
        shop: Any,
        watcher: Watcher,
        clock: Clock,
        registration: Registration,
        reading: Reading,
        state: LivingState,
    ) -> None:
        shop.register()
        registration.set_worker_state("worker", state)
        pass_time(watcher, clock, LEASE_S, lambda: registration.beat_worker("worker", state))
        assert reading.workers()[0]["state"] == state
        pass_time(watcher, clock, LEASE_S + 2)
        assert reading.workers()[0]["state"] == "lost"
        registration.beat_worker("worker", state)
        assert reading.workers()[0]["state"] == state

    def test_a_worker_that_stopped_in_order_is_not_lost(
        self, shop: Any, watcher: Watcher, clock: Clock, registration: Registration, reading: Reading
    ) -> None:
        shop.register()
        registration.set_worker_state("worker", "stopped")
        pass_time(watcher, clock, LEASE_S + 2)
        assert reading.workers()[0]["state"] == "stopped"

    def test_a_beat_since_it_was_seen_saves_the_worker(self, shop: Any, registration: Registration) -> None:
        shop.register()
        seen = registration.worker_beats()["worker"]
        registration.beat_worker("worker", "active")
        assert not registration.lose_worker("worker", seen)
        assert registration.lose_worker("worker", seen + 1)

    def test_registering_again_replaces_what_it_has(self, shop: Any, reading: Reading) -> None:
        shop.register()
        shop.register(gpus=2, capabilities=frozenset({"attention:new"}))
        (worker,) = reading.workers()
        assert worker["capabilities"] == ["attention:new"]
        assert len(worker["devices"]) == 3
