"""Chaos, in its short form: `python -m tools.chaos` is the long one. Controls of what it looks for are the tests of
tests/tools/chaos, and one real run without the fence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.chaos.plan import Fault, faults
from tools.chaos.run import run

pytestmark = pytest.mark.acceptance

SECONDS = 12.5
"""Of attack: every kind of fault happens once."""
SHORT_LEASE_S = 1.0
TRIES = 3


def test_whatever_happens_every_promise_is_kept(tmp_path: Path, rng: random.Random) -> None:
    seed = rng.getrandbits(32)
    print(f"python -m tools.chaos --minutes {SECONDS / 60} --round-seconds {SECONDS} --seed {seed}")
    result = run(tmp_path, seed, SECONDS, faults(seed, SECONDS))
    print(result.summary)
    assert result.wrong == []
    assert result.summary["jobs"]["succeeded"] > 0, "nothing was attacked"


def test_control_without_the_fence_it_finds_results_of_lost_workers(tmp_path: Path, rng: random.Random) -> None:
    plan = [Fault(at_s, "stop_worker", at, 2.5 * SHORT_LEASE_S) for at, at_s in enumerate([2.0, 2.2])]
    telling = {"events_tell_what_happened", "jobs_end_as_their_last_attempts", "results_are_of_the_last_attempt"}
    found: set[str] = set()
    for number in range(TRIES):  # nothing may run just when the workers are stopped
        folder = tmp_path / str(number)
        folder.mkdir()
        result = run(folder, rng.getrandbits(32), 5.0, plan, workers=2, lease_s=SHORT_LEASE_S, SABOTAGE="fence")
        print(result.summary)
        found |= {one.partition(":")[0] for one in result.wrong} & telling
        if found:
            return
    pytest.fail("a run without the fence looks sound")
