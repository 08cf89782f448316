"""Fair shares: whose job is next among those of equal priority. Without tokens the order is that of submission, which
each test of the order has as its control."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from app.errors import job_problem
from app.specs import spec_adapter
from app.store import tables
from app.store.database.engine import Database
from app.store.queue import registration, sharing, transitions
from app.store.queue.claims import ON_CPU_HOST
from app.store.queue.registration import Registration
from app.store.queue.sharing import Policy, agree
from app.store.queue.transitions import Queue
from app.store.records import Finish, HandedOver, NewJob
from app.store.tables import utc_now
from app.store.tokens import Tokens
from tests.app.store.conftest import ON_SQLITE

HALF_LIFE_S = Policy().half_life_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of claims and ends on by so many seconds."""
    passed = [utc_now()]

    def now() -> datetime:
        return passed[0]

    for module in (sharing, transitions, registration):
        monkeypatch.setattr(module, "utc_now", now)

    def move(seconds: float) -> None:
        passed[0] += timedelta(seconds=seconds)

    return move


@pytest.fixture
def run(shop: Any, queue: Queue, clock: Callable[[float], None]) -> Callable[..., list[int]]:
    """Runs so many jobs, one after the other, each for so long; returns their ids."""

    def run(number: int, ran_s: float | Callable[[int], float] = 60.0) -> list[int]:
        ids = []
        for _ in range(number):
            claim = shop.claim()
            clock(ran_s(claim.job_id) if callable(ran_s) else ran_s)
            queue.finish(claim, Finish("succeeded"))
            ids.append(claim.job_id)
        return ids

    return run


def jobs(shop: Any, user: str | None, number: int, **options: Any) -> list[int]:
    return [shop.submit(submitted_by=user, **options) for _ in range(number)]


def with_tokens(database: Database, **policy: Any) -> None:
    Tokens(database).create("somebody", "submit", None)
    agree(database, Policy(**policy))


@pytest.mark.parametrize("tokens", [True, False])
def test_one_job_does_not_wait_behind_many(shop: Any, database: Database, run: Any, tokens: bool) -> None:
    if tokens:
        with_tokens(database)
    many, one = jobs(shop, "ada", 12), jobs(shop, "bob", 1)
    assert run(13) == ([many[0], *one, *many[1:]] if tokens else [*many, *one])


@pytest.mark.parametrize("users", [("ada", "bob"), (None, "zoe")])
def test_the_least_device_time_is_next_however_it_is_cut(shop, database, run, users) -> None:
    with_tokens(database)
    short, long = jobs(shop, users[0], 30), jobs(shop, users[1], 3)
    order = run(33, lambda job_id: 30.0 if job_id in short else 300.0)
    assert [order.index(job_id) for job_id in long] == pytest.approx([1, 12, 23], abs=1)


@ON_SQLITE
def test_priority_comes_before_shares(shop: Any, database: Database, run: Any, rng: random.Random) -> None:
    with_tokens(database)
    submitted = [
        (-priority, shop.submit(priority=priority, submitted_by=rng.choice(["ada", "bob", None])))
        for priority in (rng.randint(-2, 2) for _ in range(30))
    ]
    taken = run(30, lambda _: rng.uniform(1, 100))
    priorities = {job_id: -minus for minus, job_id in submitted}
    assert [priorities[job_id] for job_id in taken] == sorted(priorities.values(), reverse=True)


def test_running_jobs_count_and_wide_ones_more(shop: Any, database: Database, queue: Queue, clock: Any) -> None:
    with_tokens(database)
    kinds = frozenset({"ddp", "benchmark"})
    wide = {"kind": "ddp", "strategy": "flat", "backend": "nccl", "world_size": 4}
    queue.submit(NewJob(spec_adapter.validate_python(wide), submitted_by="ada"))
    shop.claim(kinds=kinds, **GPUS)
    jobs(shop, "bob", 1, spec={"device": "cuda"})
    shop.claim(kinds=kinds, **GPUS)  # one GPU, a quarter of ada's
    ada, bob = jobs(shop, "ada", 1, spec={"device": "cuda"}), jobs(shop, "bob", 1, spec={"device": "cuda"})
    clock(10)
    assert shop.claim(kinds=kinds, **GPUS).job_id == bob[0]
    assert shop.claim(kinds=kinds, **GPUS).job_id == ada[0]


@ON_SQLITE
def test_use_decays_by_its_half_life(shop: Any, database: Database, run: Any, clock: Any) -> None:
    with_tokens(database)
    jobs(shop, "ada", 1)
    run(1, 1000)
    clock(2 * HALF_LIFE_S)  # 250 s are left
    jobs(shop, "bob", 1)
    run(1, 200)
    ada, bob = jobs(shop, "ada", 1), jobs(shop, "bob", 2)
    assert run(3, 100) == [bob[0], ada[0], bob[1]]


@ON_SQLITE
def test_a_lost_attempt_is_charged_and_one_given_back_is_not(shop, database, queue, clock) -> None:
    with_tokens(database)
    jobs(shop, "ada", 1)
    claim = shop.claim()
    clock(100)
    queue.give_back(claim)
    assert rows(database, tables.fair_share) == []
    shop.register()
    shop.claim()
    clock(100)
    queue.renew([], ("worker", "active"))
    clock(30)  # the lease, in which nothing ran
    queue.recover(queue.running()[0])
    (share,) = rows(database, tables.fair_share)
    assert (share.submitted_by, share.device_s) == ("ada", pytest.approx(100))


@ON_SQLITE
def test_a_job_without_a_device_takes_no_device_time_and_is_not_limited(shop, database, queue, clock) -> None:
    with_tokens(database, most_devices=1)
    jobs(shop, "ada", 2)
    with database.write() as connection:
        connection.execute(update(tables.job).values(device_type="none", devices=0))
    first, second = (shop.claim(idle=idle) for idle in (True, False))
    clock(100)
    with database.read() as connection:
        shares = sharing.shares(connection)
    assert (shares.of("ada"), shares.devices["ada"]) == (0.0, 0)
    for claim in (first, second):
        queue.finish(claim, Finish("succeeded"))
    (use,) = rows(database, tables.device_use)
    assert (use.attempts, use.ran_s, use.device_s, use.device) == (2, pytest.approx(200), 0.0, "none")


@pytest.mark.parametrize(("devices", "charged"), [([{"type": "cpu"}], 10.0), ([{"type": "cuda", "name": "GPU"}], 40.0)])
def test_a_job_that_takes_what_is_there_is_charged_for_that(shop, database, queue, clock, devices, charged) -> None:
    with_tokens(database)
    jobs(shop, "ada", 1)
    with database.write() as connection:
        connection.execute(update(tables.job).values(device_type="auto", devices=4))
    Registration(database).register_worker("w", "host", 1, [], [], devices, {})
    claim = queue.claim("w", replace(shop.offer(), total_gpus=4, free_gpus=4))
    clock(10)
    with database.read() as connection:
        shares = sharing.shares(connection)
    assert (shares.of("ada"), shares.devices["ada"]) == (charged, charged // 10)
    queue.finish(claim, Finish("succeeded"))
    assert [share.device_s for share in rows(database, tables.fair_share)] == [charged]


@pytest.mark.parametrize("end", ["give_up", "finish"])
@pytest.mark.parametrize("waited_only", [True, False], ids=["it waited in a cluster's queue", "control: it ran"])
def test_waiting_in_a_clusters_queue_is_not_charged(shop, database, queue, clock, end, waited_only) -> None:
    with_tokens(database)
    jobs(shop, "ada", 1)
    claim = queue.claim("slurm", shop.offer(), "Slurm: Resources")
    clock(100)
    if not waited_only:
        claim = queue.take_over(HandedOver(claim.job_id, claim.attempt, claim.token), "new", "agent")
    clock(10)
    if end == "give_up":
        queue.give_up(claim, "it is gone")
    else:
        queue.finish(claim, Finish("failed", job_problem("failed", "it is wrong")))
    assert [share.device_s for share in rows(database, tables.fair_share)] == ([] if waited_only else [10.0])
    assert len(rows(database, tables.device_use)) == (not waited_only)


@ON_SQLITE
def test_nobody_starves(shop: Any, database: Database, run: Any) -> None:
    """Whoever had all devices for long waits log2(n + 1) half-lives while n others want all of them."""
    others = 3
    with_tokens(database)
    jobs(shop, "ada", 60)
    run(60, HALF_LIFE_S / 8)
    (last,) = jobs(shop, "ada", 1)
    for other in range(others):
        jobs(shop, f"new{other}", 40)
    bound = math.log2(others + 1) * 8
    taken = run(math.ceil(bound) + others + 1, HALF_LIFE_S / 8)
    assert last in taken
    assert taken.index(last) >= math.floor(bound) - 1


GPUS: dict[str, Any] = {"total_gpus": 8, "free_gpus": 8, "idle": False}


class TestMostDevices:
    def test_a_user_holds_no_more(self, shop: Any, database: Database, queue: Queue, reading: Any) -> None:
        with_tokens(database, most_devices=2)
        shop.register(gpus=2)
        ada, bob = jobs(shop, "ada", 3, spec={"device": "cuda"}), jobs(shop, "bob", 1, spec={"device": "cuda"})
        claimed = [shop.claim(**GPUS) for _ in range(3)]
        assert sorted(claim.job_id for claim in claimed) == sorted([ada[0], ada[1], *bob])
        assert shop.try_claim(**GPUS) is None
        assert reading.job(ada[2])[0]["waiting"].startswith("ada's running jobs hold 2 devices, of at most 2")
        queue.finish(claimed[0], Finish("succeeded"))
        assert shop.claim(**GPUS).job_id == ada[2]

    def test_a_wide_job_is_not_starved_by_the_users_own_narrow_ones(self, shop: Any, database: Database) -> None:
        with_tokens(database, most_devices=2)
        narrow, wide, _later = jobs(shop, "ada", 3, spec={"device": "cuda"})
        with database.write() as connection:
            connection.execute(update(tables.job).where(tables.job.c.id == wide).values(devices=2))
        assert shop.claim(**GPUS).job_id == narrow
        assert shop.try_claim(**GPUS) is None

    def test_without_tokens_there_is_no_limit(self, shop: Any, database: Database) -> None:
        agree(database, Policy(most_devices=1))
        jobs(shop, "ada", 2, spec={"device": "cuda"})
        assert all(shop.try_claim(**GPUS) for _ in range(2))


@ON_SQLITE
def test_a_claim_reads_one_row_of_each_user(shop: Any, database: Database) -> None:
    with_tokens(database)
    jobs(shop, "ada", 1)
    query = ON_CPU_HOST.first_of_each.params(kinds=["benchmark"])
    with database.read() as connection:
        text = query.compile(connection, compile_kwargs={"literal_binds": True})
        plan = [row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
    assert not any("TEMP B-TREE" in step for step in plan), plan
    assert sum("INDEX ix_job_claimable_by_user" in step for step in plan) == 4, plan


def rows(database: Database, table: Any) -> Any:
    with database.read() as connection:
        return connection.execute(select(table)).all()


@pytest.mark.parametrize("tokens", [True, False])
def test_places_foretell_the_order(shop, database, queue, reading, run, tokens) -> None:
    if tokens:
        with_tokens(database)
    shop.register()
    jobs(shop, "ada", 1)
    run(1)
    ids = [*jobs(shop, "ada", 2), *jobs(shop, "bob", 2), *jobs(shop, None, 1), *jobs(shop, "ada", 1, priority=1)]
    places = reading.places(ids)
    foretold = sorted(ids, key=lambda job_id: places[job_id].place)
    assert [places[job_id].about_s for job_id in foretold] == pytest.approx([0, 60, 120, 180, 240, 300])
    used, now = reading.usage(utc_now())
    assert [(row["user"], row["attempts"], row["device_hours"]) for row in used] == [("ada", 1, pytest.approx(1 / 60))]
    assert {row["user"]: row["queued_jobs"] for row in now} == {"ada": 3, "bob": 2, None: 1}
    assert run(6) == foretold
