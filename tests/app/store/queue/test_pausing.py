"""Pausing kinds: nobody claims their jobs, they hold nobody up, and they say why they wait."""

from typing import Any

import pytest

from app.settings import Settings
from app.specs._base import Resources
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.queue import claims
from app.store.queue.pausing import Pausing
from app.store.queue.transitions import Queue
from app.store.records import NewJob


@pytest.fixture
def pausing(database: Database) -> Pausing:
    return Pausing(database)


@pytest.fixture
def submit(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Submits a job that is said to be of this kind, for this many GPUs; 0: one that only computes on paper."""

    def submit(kind: str, gpus: int = 1) -> int:
        needed = Resources(device_type="cuda" if gpus else "none", devices=gpus)
        with monkeypatch.context() as patch:
            patch.setattr(BenchmarkSpec, "resources", lambda self: needed)
            return int(queue.submit(NewJob(BenchmarkSpec.model_construct(kind=kind))).response["id"])

    return submit


def a_paused_job_starts(shop: Any, pausing: Pausing, submit: Any, gpus: int) -> bool:
    submit("benchmark", gpus)
    pausing.pause(["benchmark"])
    return shop.try_claim(total_gpus=2, free_gpus=2) is not None


@pytest.mark.parametrize("gpus", [0, 1])
def test_no_job_of_a_paused_kind_starts(shop: Any, pausing: Pausing, submit: Any, gpus: int) -> None:
    assert not a_paused_job_starts(shop, pausing, submit, gpus)
    assert pausing.pause([]) == []
    assert shop.try_claim(total_gpus=2, free_gpus=2) is not None


def test_control_of_the_pause(shop: Any, pausing: Pausing, submit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "unpaused", lambda kinds, _paused: kinds)
    assert a_paused_job_starts(shop, pausing, submit, 1)


def test_a_paused_wide_job_holds_no_other_kind_up(shop: Any, pausing: Pausing, submit: Any) -> None:
    submit("benchmark", gpus=2)
    narrow = submit("ceiling")
    beside = {"kinds": frozenset({"benchmark", "ceiling"}), "total_gpus": 2, "free_gpus": 1, "idle": False}
    assert shop.try_claim(**beside) is None, "the wide one decides"
    pausing.pause(["benchmark"])
    assert shop.claim(**beside).job_id == narrow


def test_it_outlives_the_process(settings: Settings, pausing: Pausing) -> None:
    assert pausing.kinds() == []
    assert pausing.pause(["kernel", "benchmark", "kernel"]) == ["benchmark", "kernel"]
    another = open_database(settings)
    assert Pausing(another).kinds() == ["benchmark", "kernel"]
    another.close()
