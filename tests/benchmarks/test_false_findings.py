"""The simulation of comparisons, with few draws: the figures of docs/measurements.md come from many."""

import random

import pytest

from benchmarks import false_findings


def percent(text: str) -> float:
    return float(text.rstrip("%"))


@pytest.mark.long
@pytest.mark.parametrize("kind", [*false_findings.NOISE])
def test_equal_sides_are_seldom_found_to_differ(kind: str) -> None:
    """By five processes and 50 cases, 77 % of comparisons had a finding."""
    rng, draws = random.Random(5), 40
    found = sum(
        false_findings.judged(kind, processes, 20, 1.0, rng)[1].conclusion in false_findings.FOUND
        for processes in (4, 5, 8)
        for _ in range(draws)
    )
    assert found <= 0.05 * 3 * draws + 3 * (0.05 * 3 * draws) ** 0.5


def test_what_is_planted_is_found_and_the_ratio_lies_in_its_interval() -> None:
    row = false_findings.planted("normal", 8, 40, random.Random(6))
    assert percent(row["found"]) >= 90
    bimodal = false_findings.planted("bimodal", 30, 40, random.Random(6))
    assert percent(bimodal["ratio outside its interval"]) == 0
