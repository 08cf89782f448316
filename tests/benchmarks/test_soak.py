"""The soak in short, with a kind that needs no torch; and the control, which finds jobs that never end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Plan, growth, soak
from tests.acceptance.conftest import environment
from tests.acceptance.sabotage import plain_job, plain_kind
from tests.forked import ForkedService

pytestmark = pytest.mark.acceptance

ESTIMATES: Any = ({"spec": {"kind": "estimate", "model": {"size": "tiny"}}},)
JOBS: Any = (
    *(plain_job("counted", number=number) for number in range(3)),
    *ESTIMATES,
    {"spec": {"kind": "estimate", "model": {"size": "none"}}},
)


def run(folder: Path, rng: random.Random, plan: Plan, *sabotage: str) -> Any:
    (folder / "misbehave").mkdir()
    with ForkedService(folder / "service", {**environment(folder), **plain_kind(*sabotage)}) as service:
        try:
            return soak(service, plan, rng)
        finally:
            print(service.logs()[-10_000:])


def test_every_accepted_job_ends_once(tmp_path: Path, rng: random.Random) -> None:
    plan = Plan(seconds=6.0, kill_every=1.5, restart_every=2.5, in_flight=6, drain=60.0, jobs=JOBS)
    seen = run(tmp_path, rng, plan)
    assert seen.wrong == []
    assert seen.ends["succeeded"] == len(seen.accepted) > 5
    assert seen.killed >= 2
    assert seen.restarted >= 1
    assert seen.refused > 0
    assert all(server > 10 and worker > 10 for _, server, worker in seen.memory)


@pytest.mark.long
def test_control_workers_that_may_claim_one_job(tmp_path: Path, rng: random.Random) -> None:
    """Two workers that look for a job first and take it a moment later end some jobs twice."""
    plan = Plan(seconds=5.0, kill_every=60.0, restart_every=60.0, in_flight=1, drain=3.0, jobs=ESTIMATES)
    seen = run(tmp_path, rng, plan, "atomic_claim")
    assert any("ended 2 times" in one for one in seen.wrong), seen


def test_growth_leaves_the_warm_up_out() -> None:
    assert growth([10, *[50.0] * 9]) == 0
    assert growth([float(number) for number in range(100)]) > 50
