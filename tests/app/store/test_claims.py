"""Which job a worker gets: order, fit, wide jobs, and names that only some workers have."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import event as events
from sqlalchemy.dialects import postgresql

from app.specs._base import Resources
from app.specs.benchmark import BenchmarkSpec
from app.store import claims
from app.store.engine import Database
from app.store.queue import Queue
from app.store.records import NewJob

CPU = {"device": "cpu"}
CUDA = {"device": "cuda"}
GPUS = {"total_gpus": 2, "free_gpus": 2}


@pytest.fixture
def submit_needing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Submits a job that needs the resources given, which no real spec asks for yet."""

    def submit(**resources: Any) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(BenchmarkSpec, "resources", lambda self: Resources(**resources))
            return int(queue.submit(NewJob(BenchmarkSpec())).response["id"])

    return submit


def test_priority_then_submission(shop: Any, rng: random.Random) -> None:
    jobs = [(-priority, shop.submit(priority=priority)) for priority in (rng.randint(-3, 3) for _ in range(40))]
    claimed = [shop.claim().job_id for _ in jobs]
    assert claimed == [job_id for _, job_id in sorted(jobs)]
    assert shop.try_claim() is None


def test_a_job_of_another_kind_is_passed_over(shop: Any) -> None:
    shop.submit()
    assert shop.try_claim(kinds=frozenset({"profile"})) is None
    assert shop.try_claim(kinds=frozenset()) is None
    assert shop.try_claim(kinds=frozenset({"profile", "benchmark"})) is not None


class TestFit:
    def test_a_cpu_worker_never_takes_a_cuda_job(self, shop: Any) -> None:
        shop.submit(spec=CUDA)
        assert shop.try_claim() is None
        auto = shop.submit()
        assert shop.claim().job_id == auto

    def test_auto_takes_a_gpu_where_there_is_one(self, shop: Any) -> None:
        shop.submit()
        assert shop.try_claim(total_gpus=2, free_gpus=0) is None
        assert shop.try_claim(total_gpus=2, free_gpus=1, idle=False) is not None

    @pytest.mark.parametrize("gpus", [0, 2])
    def test_a_job_on_the_cpu_runs_alone(self, shop: Any, gpus: int) -> None:
        shop.submit(spec=CPU)
        assert shop.try_claim(total_gpus=gpus, free_gpus=gpus, idle=False) is None
        assert shop.try_claim(total_gpus=gpus, free_gpus=gpus) is not None

    def test_an_auto_job_on_a_cpu_host_runs_alone(self, shop: Any) -> None:
        shop.submit()
        assert shop.try_claim(idle=False) is None

    def test_an_exclusive_job_waits_for_an_idle_host(self, shop: Any, submit_needing: Any) -> None:
        submit_needing(device_type="cuda", devices=1, exclusive_host=True)
        assert shop.try_claim(**GPUS, idle=False) is None
        assert shop.try_claim(**GPUS) is not None

    def test_a_wide_job_is_not_starved_by_narrow_ones(self, shop: Any, submit_needing: Any) -> None:
        wide = submit_needing(device_type="cuda", devices=2)
        narrow = shop.submit(spec=CUDA)
        assert shop.try_claim(total_gpus=2, free_gpus=1, idle=False) is None
        assert shop.claim(**GPUS).job_id == wide
        assert shop.claim(**GPUS).job_id == narrow

    def test_a_job_that_the_host_could_never_run_holds_nobody_up(self, shop: Any, submit_needing: Any) -> None:
        submit_needing(device_type="cuda", devices=3)
        submit_needing(device_type="auto", devices=3)
        narrow = shop.submit(spec=CUDA)
        assert shop.claim(**GPUS).job_id == narrow
        assert shop.try_claim(**GPUS) is None

    def test_what_cannot_be_claimed_is_passed_over_however_much_it_is(
        self, shop: Any, queue: Queue, submit_needing: Any
    ) -> None:
        shop.register("other", capabilities=frozenset({"attention:new", "model:transformer_lm"}))
        queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec(attention="new"), priority=1)] * 500)
        queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec(attention="new"))] * 500)
        mine = shop.submit()
        assert shop.claim().job_id == mine
        assert shop.try_claim() is None


class TestRequirements:
    NEW = frozenset({"attention:new", "model:transformer_lm"})

    def test_a_worker_that_has_the_name_gets_the_job(self, shop: Any) -> None:
        shop.register("mine")
        shop.register("other", capabilities=self.NEW)
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.try_claim("mine") is None
        assert shop.claim("other", capabilities=self.NEW).job_id == job_id

    def test_when_nobody_has_it_the_runner_says_unsupported(self, shop: Any) -> None:
        shop.register("mine")
        shop.register("other")
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.claim("mine").job_id == job_id

    @pytest.mark.parametrize("state", ["draining", "stopped", "lost"])
    def test_a_worker_that_takes_no_jobs_does_not_count(self, shop: Any, queue: Queue, state: Any) -> None:
        shop.register("other", capabilities=self.NEW)
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.try_claim("mine") is None
        shop.registration.set_worker_state("other", state)
        assert shop.claim("mine").job_id == job_id

    def test_nor_does_one_without_the_devices(self, shop: Any) -> None:
        shop.register("other", capabilities=self.NEW, gpus=0)
        job_id = shop.submit(spec={"attention": "new", "device": "cuda"})
        assert shop.claim("mine", **GPUS).job_id == job_id

    def test_one_with_the_devices_does(self, shop: Any) -> None:
        shop.register("other", capabilities=self.NEW, gpus=2)
        shop.submit(spec={"attention": "new", "device": "cuda"})
        assert shop.try_claim("mine", **GPUS) is None

    def test_a_worker_does_not_wait_for_itself(self, shop: Any) -> None:
        # Registered with a name that it has lost since.
        shop.register("mine", capabilities=self.NEW)
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.claim("mine").job_id == job_id


@pytest.mark.parametrize("pages", [claims.FIRST_PAGE, claims.NEXT_PAGE])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_claims_come_from_the_partial_index_without_sorting(
    database: Database, pages: dict[bool, Any], on_gpus: bool
) -> None:
    values = {"kinds": ["benchmark"], "total_gpus": 2, "limit": 4, "last_priority": 0, "last_id": 1}
    executed: list[tuple[str, Any]] = []

    def remember(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_others: Any) -> None:
        executed.append((statement, parameters))

    with database.read() as connection:
        events.listen(connection, "before_cursor_execute", remember)
        connection.execute(pages[on_gpus], values).all()
        statement, parameters = executed[-1]
        plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert len(plan) == 1, plan
    assert "USING INDEX ix_job_claimable" in plan[0]


def test_the_hint_is_for_sqlite_alone() -> None:
    assert "INDEXED" not in str(claims.FIRST_PAGE[True].compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
