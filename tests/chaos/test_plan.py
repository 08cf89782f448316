"""The seed of a chaos run gives its faults and its clients' choices."""

import random
from typing import get_args

import pytest

from tests.chaos.plan import BEHAVIOURS, ENDLESS, LASTS_S, NEVER_SUCCEED, OUTAGES, SLURM, faults, job_body
from tests.chaos.run import growth
from tests.plugins.hostile_kind.jobs.hostile import BEHAVIOURS as RUN
from tests.plugins.hostile_kind.specs.hostile import Behaviour, HostileSpec


def test_a_seed_gives_the_same_faults_again() -> None:
    assert faults(5, 60.0) == faults(5, 60.0) != faults(6, 60.0)


@pytest.mark.parametrize(("seconds", "per_s"), [(7.5, 2.0), (60.0, 1.2)])
def test_every_kind_of_fault_happens(seconds: float, per_s: float) -> None:
    plan = faults(3, seconds, tuple(LASTS_S), per_s=max(per_s, len(LASTS_S) / seconds))
    assert {fault.kind for fault in plan} == set(LASTS_S)
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert all(0 <= fault.at_s <= seconds for fault in plan)
    least_and_most = [LASTS_S[fault.kind] for fault in plan]
    assert all(least <= fault.lasts_s <= most for fault, (least, most) in zip(plan, least_and_most, strict=True))


def test_an_outage_that_lasts_happens_once_and_whole() -> None:
    plan = [fault for fault in faults(3, 300.0, SLURM, outage_s=120.0) if fault.kind in OUTAGES]
    assert {fault.kind for fault in plan} == OUTAGES
    assert len(plan) == len(OUTAGES)
    assert all(fault.lasts_s == 120.0 and fault.at_s <= 180.0 for fault in plan)


def test_every_behaviour_is_submitted_and_has_an_end() -> None:
    rng = random.Random(1)
    bodies = [job_body(rng, number) for number in range(1000)]
    assert {body["spec"]["behaviour"] for body in bodies} == set(BEHAVIOURS) == set(RUN) == set(get_args(Behaviour))
    assert all("timeout_s" in body for body in bodies if body["spec"]["behaviour"] in ENDLESS)
    assert set(BEHAVIOURS) >= NEVER_SUCCEED | ENDLESS
    for body in bodies[:100]:
        HostileSpec.model_validate(body["spec"])


def test_growth_leaves_the_warm_up_out() -> None:
    assert growth([10] * 120 + [50] * 1080) == 0
    assert growth([*range(1200)]) > 150
    assert growth([*range(1199)]) == 0, "it did not run for long"
