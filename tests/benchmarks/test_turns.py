"""What loads of the host do to comparisons in turns."""

from __future__ import annotations

import pytest

from benchmarks.turns import LOADS, fixed, shares
from workers.jobs.compare import turns

DRAWS = 120
MOST = 0.11
"""Of 120 comparisons, that 5 % are found is this often or less with a probability of 0.995."""


@pytest.mark.parametrize("name", [name for name in LOADS if name != "none"])
def test_no_load_makes_equal_sides_differ(name: str) -> None:
    _, found_slower, gate_slower, _ = shares(LOADS[name], turns, 8, DRAWS)
    assert gate_slower <= found_slower <= MOST


def test_a_planted_slowdown_is_found_under_a_drift() -> None:
    *_, found = shares(LOADS["a drift by 10%"], turns, 8, DRAWS)
    assert found > 0.9


def test_control_a_load_of_four_turns_keeps_time_with_a_fixed_order() -> None:
    *_, gate_slower, _ = shares(LOADS["10%, period of 4 turns"], fixed, 8, DRAWS)
    assert gate_slower > 0.15
