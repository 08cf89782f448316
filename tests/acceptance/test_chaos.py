"""Chaos, in its short form: `python -m tests.chaos` is the long one. Controls of what it looks for are the tests of
tests/chaos: each violation, made in a sound database, is found."""

import random
from pathlib import Path

import pytest

from tests.chaos.plan import LOCAL, faults
from tests.chaos.run import run
from tests.forked import ForkedService

pytestmark = pytest.mark.acceptance

SECONDS = 6.0
"""Of attack: every kind of fault happens once."""
WORKERS = 2


def test_whatever_happens_every_promise_is_kept(tmp_path: Path, rng: random.Random) -> None:
    seed = rng.getrandbits(32)
    print(f"seed {seed}")
    plan = faults(seed, SECONDS, per_s=len(LOCAL) / SECONDS)
    result = run(tmp_path, seed, SECONDS, plan, workers=WORKERS, service=ForkedService)
    print(result.summary)
    assert result.wrong == []
    assert result.summary["units"]["end"] > 0, "nothing was attacked"
