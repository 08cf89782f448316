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


@pytest.mark.parametrize(("name", "least"), [("a drift by 10%", 0.98), ("a jump by 10%", 0.68)])
def test_a_planted_slowdown_is_found(name: str, least: float) -> None:
    """Without regard to the blocks of the turns, 96 and 58 % were found."""
    *_, found = shares(LOADS[name], turns, 8, DRAWS)
    assert found > least


def test_control_a_load_of_four_turns_keeps_time_with_a_fixed_order() -> None:
    *_, gate_slower, _ = shares(LOADS["10%, period of 4 turns"], fixed, 8, DRAWS)
    assert gate_slower > 0.15
