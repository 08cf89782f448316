"""Which job a worker gets: order, fit, wide jobs, and names that only some workers have."""

import random
from typing import Any

import pytest

from app.specs._base import Resources
from app.specs.benchmark import BenchmarkSpec
from app.store.queue import claims
from app.store.queue.transitions import Queue
from app.store.records import NewJob
from app.store.tokens import Tokens
from tests.app.store.conftest import ON_SQLITE
from tests.app.store.reading.test_query_plans import plans

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

    def test_jobs_that_nobody_can_claim_are_passed_over(self, shop: Any, queue: Queue, submit_needing: Any) -> None:
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

    def test_when_nobody_ever_had_it_the_runner_says_unsupported(self, shop: Any) -> None:
        shop.register("mine")
        shop.register("other")
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.claim("mine").job_id == job_id

    @pytest.mark.parametrize("state", ["draining", "stopped", "lost"])
    def test_a_job_waits_for_a_worker_like_one_that_has_gone(self, shop: Any, state: Any) -> None:
        shop.register("other", capabilities=self.NEW)
        job_id = shop.submit(spec={"attention": "new"})
        shop.registration.set_worker_state("other", state)
        assert shop.try_claim("mine") is None
        assert shop.claim("another", capabilities=self.NEW).job_id == job_id

    def test_a_worker_without_the_devices_is_not_waited_for(self, shop: Any) -> None:
        shop.register("other", capabilities=self.NEW, gpus=0)
        job_id = shop.submit(spec={"attention": "new", "device": "cuda"})
        assert shop.claim("mine", **GPUS).job_id == job_id

    def test_a_worker_does_not_wait_for_itself(self, shop: Any) -> None:
        # Registered with a name that it has lost since.
        shop.register("mine", capabilities=self.NEW)
        job_id = shop.submit(spec={"attention": "new"})
        assert shop.claim("mine").job_id == job_id


class TestWithoutDevices:
    """Jobs that only compute on paper run beside whatever runs."""

    def test_any_host_takes_one_beside_what_runs(self, shop: Any, submit_needing: Any) -> None:
        paper = submit_needing(device_type="none", devices=0)
        assert shop.try_claim(idle=False, deviceless=False) is None
        assert shop.claim(idle=False).job_id == paper
        paper = submit_needing(device_type="none", devices=0)
        assert shop.claim(total_gpus=2, free_gpus=0, idle=False).job_id == paper

    def test_it_waits_for_no_wide_job_and_keeps_none_waiting(self, shop: Any, submit_needing: Any) -> None:
        wide = submit_needing(device_type="cuda", devices=2)
        paper = submit_needing(device_type="none", devices=0)
        busy = {"total_gpus": 2, "free_gpus": 1, "idle": False}
        assert shop.claim(**busy).job_id == paper
        assert shop.try_claim(**busy) is None
        assert shop.claim(**GPUS).job_id == wide

    def test_a_host_with_enough_of_them_goes_on_with_the_others(self, shop: Any, submit_needing: Any) -> None:
        submit_needing(device_type="none", devices=0)
        on_device = shop.submit()
        assert shop.claim(deviceless=False).job_id == on_device

    @pytest.mark.parametrize("gpus", [0, 2])
    @pytest.mark.parametrize("users", [False, True])
    def test_it_passes_no_earlier_job_that_runs_alone(self, shop, submit_needing, gpus, users, database) -> None:
        if users:
            Tokens(database).create("ada", "submit", None)
        on_cpu, paper = submit_needing(device_type="cpu", devices=1), submit_needing(device_type="none", devices=0)
        busy = {"total_gpus": gpus, "free_gpus": 0, "idle": False}
        assert shop.try_claim(**busy) is None, "else one paper after another would keep it waiting for ever"
        assert shop.claim(total_gpus=gpus, free_gpus=gpus).job_id == on_cpu
        assert shop.claim(**busy).job_id == paper, "a worker makes no offer while the host is locked"

    def test_an_exclusive_one_is_passed_by_none(self, shop: Any, submit_needing: Any) -> None:
        alone = submit_needing(device_type="none", devices=0, exclusive_host=True)
        submit_needing(device_type="cuda", devices=1)
        assert shop.try_claim(total_gpus=2, free_gpus=1, idle=False) is None
        assert shop.claim(total_gpus=2, free_gpus=2).job_id == alone


LANES = {"ix_job_deviceless": [claims.DEVICELESS], "ix_job_claimable": [claims.ON_CPU_HOST, claims.ON_GPU_HOST]}


@ON_SQLITE
@pytest.mark.parametrize("page", ["first_page", "next_page"])
@pytest.mark.parametrize(("index", "lane"), [(index, lane) for index, lanes in LANES.items() for lane in lanes])
def test_claims_come_from_a_partial_index_without_sorting(database, index, lane, page) -> None:
    values = {"kinds": ["benchmark"], "total_gpus": 2, "limit": 4, "last_priority": 0, "last_id": 1}

    def look() -> None:
        with database.read() as connection:
            connection.execute(getattr(lane, page), values).all()

    plan = plans(database, look)
    assert len(plan) == 1, plan
    assert f"USING INDEX {index}" in plan[0]
