from __future__ import annotations

import random
import statistics as standard

import numpy as np
import pytest

from workers.measure.statistics import coefficient_of_variation, drift, median_interval, summarize


@pytest.mark.parametrize("n", [2, 3, 10, 101])
def test_a_summary_agrees_with_numpy(n: int, rng: random.Random) -> None:
    samples = [rng.lognormvariate(0, 1) for _ in range(n)]
    summary = summarize(samples)
    assert summary.n == n
    assert summary.mean == pytest.approx(np.mean(samples))
    assert summary.std == pytest.approx(np.std(samples, ddof=1))
    assert (summary.min, summary.max) == (min(samples), max(samples))
    quantiles = [summary.p05, summary.p25, summary.median, summary.p75, summary.p95]
    assert quantiles == pytest.approx(np.quantile(samples, [0.05, 0.25, 0.5, 0.75, 0.95]))


def test_one_sample_has_no_deviation() -> None:
    summary = summarize([3.5])
    assert summary.std is None
    assert {summary.mean, summary.median, summary.min, summary.max, summary.p05, summary.p95} == {3.5}


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_sample_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no samples|not finite"):
        summarize(samples)


def test_the_median_interval_is_of_order_statistics() -> None:
    assert median_interval(range(5)) is None, "2 · 2⁻⁵ is more than 5 %"
    assert median_interval(range(6)) == (0, 5)
    # Binomial tables: for n = 20 the 95 % interval is the 6th to the 15th value.
    assert median_interval(range(1, 21)) == (6, 15)
    assert median_interval(range(1, 21), level=0.999) == (3, 18)


@pytest.mark.parametrize("n", [10, 25, 1500])
def test_the_median_interval_covers_as_often_as_it_says(n: int, rng: random.Random) -> None:
    trials = 400
    median = 1.0  # of exp(normal)
    covered = 0
    for _ in range(trials):
        interval = median_interval([rng.lognormvariate(0, 1) for _ in range(n)])
        assert interval is not None
        covered += interval[0] <= median <= interval[1]
    assert covered / trials > 0.95 - 4 * (0.05 * 0.95 / trials) ** 0.5


def test_exact_and_approximate_intervals_meet() -> None:
    exact, approximate = median_interval(range(1000)), median_interval(range(1001))
    assert exact is not None
    assert approximate is not None
    assert abs(exact[0] - approximate[0]) <= 2
    assert abs(exact[1] - approximate[1]) <= 2


def test_variation_and_drift() -> None:
    samples = [1.0, 2.0, 3.0]
    assert coefficient_of_variation(samples) == pytest.approx(standard.stdev(samples) / 2)
    assert coefficient_of_variation([1.0]) is None
    assert drift([1.0] * 8) is None
    assert drift([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.2, 1.2, 1.2]) == pytest.approx(0.2)
