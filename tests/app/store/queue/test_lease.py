import os
import socket
import subprocess
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.errors import CannotRunHere, DatabaseBusy, LeaseLost
from app.settings import Settings
from app.states import LivingState
from app.store.database.engine import Database
from app.store.queue import fence, transitions
from app.store.queue import registration as registration_module
from app.store.queue.lease import Watcher, with_agreed_lease
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish
from tests.clock import Clock

LEASE_S = 30.0


@pytest.fixture
def watcher(queue: Queue, registration: Registration, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    """A watcher that does not commit: most tests poll every second of a lease. Those of stalls have one that does."""
    monkeypatch.setattr(queue, "probe", lambda: None)
    return Watcher(queue, registration, LEASE_S, clock)


def pass_time(watcher: Watcher, clock: Clock, seconds: float, meanwhile: Any = lambda: None) -> list[int]:
    """Poll every second for so long."""
    recovered = []
    for _ in range(round(seconds)):
        clock.now += 1
        meanwhile()
        recovered += watcher.poll()
    return recovered


def test_a_silent_attempt_is_recovered_after_its_lease(shop, watcher, clock, queue, reading) -> None:
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
    for _ in range(2):
        assert pass_time(watcher, clock, LEASE_S - 2) == []
        queue.renew([claim])
    assert pass_time(watcher, clock, LEASE_S + 5) == [claim.job_id]


def test_a_watcher_that_wakes_expires_nobody(shop, watcher, clock, queue, reading) -> None:
    claim = shop.running_job()
    pass_time(watcher, clock, 5)
    clock.now += 3600
    assert watcher.poll() == []
    queue.renew([claim])
    assert pass_time(watcher, clock, LEASE_S - 2) == []
    assert reading.job(claim.job_id)[0]["state"] == "running"
    # One that is silent for good is found all the same.
    assert pass_time(watcher, clock, 5) == [claim.job_id]


def test_a_new_watcher_gives_everybody_a_whole_lease(shop, queue, registration, clock) -> None:
    claim = shop.running_job()
    clock.now += 3600
    restarted = Watcher(queue, registration, LEASE_S, clock)
    assert pass_time(restarted, clock, LEASE_S) == []
    assert pass_time(restarted, clock, 2) == [claim.job_id]


@pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(days=4000)])
def test_a_jump_of_the_wall_clock_expires_nothing(shop, watcher, clock, queue, reading, jump, monkeypatch) -> None:
    shop.register()
    claim = shop.running_job()
    pass_time(watcher, clock, 5)
    for module in (transitions, registration_module):
        monkeypatch.setattr(module, "utc_now", lambda: datetime.now(UTC) + jump)
    assert pass_time(watcher, clock, LEASE_S - 7) == []
    queue.renew([claim])
    shop.queue.renew([], ("worker", "active"))
    assert pass_time(watcher, clock, LEASE_S - 2) == []
    assert reading.workers()[0]["state"] == "active"
    assert queue.finish(claim, Finish("succeeded")) == "succeeded"


def stalled(watcher: Watcher, clock: Clock, seconds: float, settings: Settings, meanwhile: Any) -> list[int]:
    """Poll every five seconds for so long, while somebody holds the lock that every writer needs."""
    recovered = []
    with closing(Database(settings.resolved_database_url)) as other, other.write():
        for _ in range(round(seconds / 5)):
            clock.now += 5
            for work in (meanwhile, watcher.poll):
                with suppress(DatabaseBusy):
                    recovered += work() or []  # type: ignore[operator]
    return recovered


@pytest.mark.parametrize("sabotage", [False, True], ids=["as it is", "judging without a commit"])
def test_while_nobody_can_write_nobody_is_silent(shop, settings, clock, reading, monkeypatch, sabotage) -> None:
    database = Database(settings.resolved_database_url, busy_timeout_s=0.02)
    queue, registration = Queue(database), Registration(database)
    watcher = Watcher(queue, registration, LEASE_S, clock)
    if sabotage:
        monkeypatch.setattr(Queue, "probe", lambda _self: None)
    shop.register()
    claim = shop.running_job(max_attempts=1)
    pass_time(watcher, clock, LEASE_S / 3)
    worker: tuple[str, LivingState] = ("worker", "active")
    stalled(watcher, clock, 2 * LEASE_S, settings, lambda: queue.renew([claim], worker) and None)
    database.close()
    database = Database(settings.resolved_database_url)
    watcher._queue, watcher._registration = queue, registration = Queue(database), Registration(database)
    found = watcher.poll()  # before the worker has its turn
    queue.renew([claim], worker)
    found += pass_time(watcher, clock, LEASE_S - 2)
    assert found == ([claim.job_id] if sabotage else [])
    assert reading.workers()[0]["state"] == "active"
    # One that is silent although it could write is found as ever.
    pass_time(watcher, clock, 5)
    assert reading.job(claim.job_id)[0]["error"]["code"] == "worker_lost"
    database.close()


def test_a_late_look_expires_no_worker(shop, watcher, clock, queue, monkeypatch) -> None:
    claim = shop.running_job()

    def slowly() -> None:
        clock.now += 0.1 * LEASE_S

    watcher.poll()
    with monkeypatch.context() as patched:
        patched.setattr(queue, "probe", slowly)
        assert pass_time(watcher, clock, 3 * LEASE_S) == []
    assert pass_time(watcher, clock, LEASE_S) == []
    assert pass_time(watcher, clock, 1) == [claim.job_id]


def test_a_workers_beat_and_its_renewals_are_one_transaction(shop, queue, registration, monkeypatch) -> None:
    shop.register()
    claim = shop.running_job()
    assert queue.renew([claim], ("worker", "draining")).lost == frozenset()
    before = registration.worker_beats(), queue.running()
    assert (before[0]["worker"], before[1][0].beat) == (1, 1)

    def fail(*_: object) -> bool:
        raise DatabaseBusy("now")

    monkeypatch.setattr(fence, "renew", fail)
    with pytest.raises(DatabaseBusy):
        queue.renew([claim], ("worker", "active"))
    assert (registration.worker_beats(), queue.running()) == before


class TestTheDatabasesLease:
    def agreed(self, database: Database, **lease: float) -> float:
        return with_agreed_lease(database, Settings(**lease)).lease_s

    def test_the_first_process_decides(self, database: Database, queue: Queue) -> None:
        assert queue.lease_s() is None
        assert self.agreed(database, lease_s=3) == 3
        assert self.agreed(database) == queue.lease_s() == 3
        assert self.agreed(database, lease_s=3) == 3

    def test_a_variable_changes_it(self, database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.agreed(database) == 30
        monkeypatch.setenv("FLOPWATCH_LEASE_S", "31")
        assert with_agreed_lease(database, Settings.from_environment()).lease_s == queue.lease_s() == 31

    def test_two_leases_would_lose_a_healthy_job(self, shop, queue, registration, clock, database) -> None:
        """The control: what is refused above does harm. The worker renews every 10 s, a third of its own lease."""
        claim = shop.running_job()
        assert pass_time(Watcher(queue, registration, 3.0, clock), clock, 9) == [claim.job_id]
        again = shop.claim()
        self.agreed(database, lease_s=LEASE_S)
        same = Watcher(queue, registration, 3.0, clock)
        for _ in range(3):
            assert pass_time(same, clock, 10) == []
            queue.renew([again])

    def test_a_watcher_hears_of_a_change(self, database: Database, watcher: Watcher) -> None:
        self.agreed(database)
        self.agreed(database, lease_s=7)
        watcher.poll()
        assert watcher.lease_s == 7.0

    @pytest.mark.parametrize("state", ["active", "draining"])
    def test_it_does_not_change_while_a_worker_lives(self, shop, database, registration, queue, state) -> None:
        self.agreed(database)
        shop.register("worker-1")
        registration.set_worker_state("worker-1", state)
        said = r"FLOPWATCH_LEASE_S is 7, .* is 30 seconds.* unset .* or stop worker-1 first"
        with pytest.raises(CannotRunHere, match=said):
            self.agreed(database, lease_s=7)
        assert queue.lease_s() == self.agreed(database) == 30
        registration.set_worker_state("worker-1", "stopped")
        assert self.agreed(database, lease_s=7) == queue.lease_s() == 7

    def test_a_worker_of_this_host_that_was_killed_is_none(self, database, registration, queue) -> None:
        def register(name: str, pid: int) -> None:
            registration.register_worker(name, socket.gethostname(), pid, [], [], [], {})

        killed = subprocess.Popen(["true"])
        killed.wait()
        self.agreed(database)
        register("killed", killed.pid)
        self.agreed(database, lease_s=7)
        register("runs", os.getpid())
        with pytest.raises(CannotRunHere, match="stop runs first"):
            self.agreed(database, lease_s=8)
        assert queue.lease_s() == 7


class TestWorkers:
    @pytest.mark.parametrize("state", ["active", "draining"])
    def test_a_silent_worker_is_lost_and_comes_back(self, shop, watcher, clock, registration, reading, state) -> None:
        shop.register()
        registration.set_worker_state("worker", state)
        pass_time(watcher, clock, LEASE_S, lambda: shop.queue.renew([], ("worker", state)))
        assert reading.workers()[0]["state"] == state
        pass_time(watcher, clock, LEASE_S + 2)
        assert reading.workers()[0]["state"] == "lost"
        shop.queue.renew([], ("worker", state))
        assert reading.workers()[0]["state"] == state

    def test_a_worker_that_stopped_in_order_is_not_lost(self, shop, watcher, clock, registration, reading) -> None:
        shop.register()
        registration.set_worker_state("worker", "stopped")
        pass_time(watcher, clock, LEASE_S + 2)
        assert not registration.lose_worker("worker", 0), "it stopped since a watcher looked"
        assert reading.workers()[0]["state"] == "stopped"

    def test_a_beat_since_it_was_seen_saves_the_worker(self, shop: Any, registration: Registration) -> None:
        shop.register()
        seen = registration.worker_beats()["worker"]
        shop.queue.renew([], ("worker", "active"))
        assert not registration.lose_worker("worker", seen)
        assert registration.lose_worker("worker", seen + 1)

    def test_registering_again_replaces_what_it_has(self, shop: Any, reading: Reading) -> None:
        shop.register()
        shop.register(gpus=2, capabilities=frozenset({"attention:new"}))
        (worker,) = reading.workers()
        assert (worker["capabilities"], len(worker["devices"])) == (["attention:new"], 3)


Deaths = list[list[int]]


def until_all_have_ended(shop: Any, watcher: Watcher, clock: Clock, jobs: int, culprits: set[int]) -> Any:
    """Let workers with eight GPUs, one after another, run the jobs; those in `culprits` kill the one that runs them.
    Returns the ids, and the places of the jobs that died at once."""
    ids = [shop.submit(max_attempts=2) for _ in range(jobs)]
    deaths: Deaths = []
    for number in range(4 * jobs):
        worker, claims = f"w{number}", list[Any]()
        shop.register(worker, gpus=2)
        while not any(claim.exclusive_host for claim in claims):
            offer = {"total_gpus": 8, "free_gpus": 8 - len(claims), "idle": not claims}
            if (claim := shop.try_claim(worker, **offer)) is None:
                break
            claims.append(claim)
        places = sorted(ids.index(claim.job_id) for claim in claims)
        if culprits.intersection(places):
            deaths.append(places)
            pass_time(watcher, clock, LEASE_S + 3)
        else:
            for claim in claims:
                shop.queue.finish(claim, Finish("succeeded"))
            shop.queue.renew([], (worker, "active"))
    return ids, deaths


@pytest.mark.parametrize("culprits", [{2}, {1, 2, 4}])
def test_jobs_that_are_lost_with_a_culprit_succeed(shop, watcher, clock, reading, culprits) -> None:
    ids, deaths = until_all_have_ended(shop, watcher, clock, 5, culprits)
    for place, job_id in enumerate(ids):
        job = reading.job(job_id)[0]
        if place in culprits:
            assert (job["state"], job["error"]["code"]) == ("failed", "worker_lost")
        else:
            assert job["state"] == "succeeded"
    assert deaths[:2] == [[0, 1, 2, 3, 4]] * 2, "one loss may be the host's: it costs nobody a thing"
    assert sorted(deaths[2:]) == sorted([place] for place in culprits for _ in range(2)), "then they run alone"
    told = reading.attempts(ids[0])[0]["error"]["detail"]
    assert f"while it ran the jobs {', '.join(map(str, ids))}." in told


def test_control_of_jobs_that_are_lost_with_a_culprit(shop, watcher, clock, reading, monkeypatch) -> None:
    monkeypatch.setattr(transitions, "_excuse", lambda *_: None)
    ids, _ = until_all_have_ended(shop, watcher, clock, 5, {2})
    assert {reading.job(job_id)[0]["state"] for job_id in ids} == {"failed"}


def test_a_job_that_a_living_worker_has_lost_charges_nobody_else(shop, watcher, clock, queue, reading) -> None:
    shop.register("w", gpus=2)
    ids = [shop.submit(max_attempts=1) for _ in range(2)]
    lost, kept = (shop.claim("w", total_gpus=2, free_gpus=free, idle=free == 2) for free in (2, 1))
    pass_time(watcher, clock, LEASE_S + 2, lambda: queue.renew([kept], ("w", "active")))
    assert [reading.job(job_id)[0]["state"] for job_id in ids] == ["failed", "running"]
    assert lost.job_id == ids[0]
    assert reading.job(ids[1])[0]["max_attempts"] == 1
