"""What buckets leave exposed beside formulas, and fits beside lines that are known."""

import math
import random

import pytest

from parallel.bucket_size import Line, exposed, fit

TOTAL = 400_000_000
LINES = [Line(20e-6, 1 / 200e9), Line(2e-3, 1 / 1e9), Line(1e-6, 1 / 2e9), Line(0.0, 1 / 5e9)]
BACKWARDS = [0.0, 0.01, 0.1, 0.4, 3.0]


@pytest.mark.parametrize("line", LINES, ids=str)
@pytest.mark.parametrize("backward_s", BACKWARDS)
def test_of_equal_buckets_as_much_is_exposed_as_the_formula_says(line: Line, backward_s: float) -> None:
    """With t for a call: t + (n - 1) · max(0, t - T / n)."""
    for number in (1, 2, 7, 100, 5000):
        call = line.seconds(TOTAL / number)
        formula = call + (number - 1) * max(0.0, call - backward_s / number)
        assert exposed(line, [TOTAL / number] * number, backward_s) == pytest.approx(formula, rel=1e-9, abs=1e-12)


def test_a_large_bucket_is_exposed_where_it_comes_last() -> None:
    line, small, large = Line(0.0, 1 / 1e9), [10_000_000] * 10, 300_000_000
    assert exposed(line, [large, *small], 1.6) == pytest.approx(0.01)
    assert exposed(line, [*small, large], 1.6) == pytest.approx(0.3)


def test_a_fit_finds_latency_and_bandwidth_and_their_intervals(rng: random.Random) -> None:
    line = Line(30e-6, 1 / 50e9)
    sizes = [2**power for power in range(12, 28, 3)]
    times = {size: [line.seconds(size) * rng.uniform(0.97, 1.03) for _ in range(30)] for size in sizes}
    found = fit(times)
    assert found.line.latency_s == pytest.approx(line.latency_s, rel=0.02)
    assert found.line.s_per_byte == pytest.approx(line.s_per_byte, rel=0.02)
    assert 0 < found.largest_error < 0.03
    low, high = found.interval(lambda drawn: drawn.latency_s)
    assert low < found.line.latency_s < high < low * 1.06


def test_nothing_is_negative() -> None:
    assert fit({10**6: [1e-3], 2 * 10**6: [2.5e-3], 4 * 10**6: [9e-3]}).line.latency_s == 0
    assert fit({10**3: [3e-3], 10**4: [2e-3], 10**6: [1e-3]}).line.s_per_byte == 0


@pytest.mark.parametrize("samples", [[], [0.0], [1.0, -1.0], [math.nan], [1.0, math.inf]])
def test_times_that_are_none_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="size 2: it and the times of its calls must be positive"):
        fit({1: [1.0], 2: samples, 3: [2.0]})
    with pytest.raises(ValueError, match="size 0: "):
        fit({0: [1.0], 1: [1.0], 2: [2.0]})


def test_two_sizes_are_too_few() -> None:
    with pytest.raises(ValueError, match="need 3"):
        fit({1: [1.0], 2: [2.0]})
