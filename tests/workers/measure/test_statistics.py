import math
import random

import numpy as np
import pytest

from flopwatch.intervals import median_interval
from workers.measure.statistics import drift, error_of_median, summarize


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


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_sample_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no samples|not finite"):
        summarize(samples)


def test_the_error_of_a_median_is_the_larger_distance_to_an_end_of_its_interval() -> None:
    ten = [float(number) for number in range(1, 11)]  # from the 2nd to the 9th, about 5.5
    assert error_of_median(ten) == pytest.approx(3.5 / 5.5)
    assert error_of_median([1.0, 2.0, 3.0]) == pytest.approx(0.5), "of few samples, all of them"
    assert error_of_median([1.0, 2.0, 6.0]) == pytest.approx(2.0)
    assert error_of_median([*ten[:9], 1e6]) == error_of_median(ten), "one interrupted step says nothing"
    assert error_of_median([1.0]) is None
    assert error_of_median([0.0, 0.0]) is None
    for n in (*range(6, 100), 846, 1001):  # that of tables; the normal approximation is wider for 17, 44 … 846
        samples = [float(number) ** 2 for number in range(1, n + 1)]
        low, high = median_interval(samples) or (0, 0)
        middle = float(np.median(samples))
        assert error_of_median(samples) == max(high - middle, middle - low) / middle


def test_a_drift_comes_with_its_error() -> None:
    assert drift([1.0] * 8) is None
    assert drift([0.0] * 9) is None
    change, error = drift([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.2, 1.2, 1.2]) or (0, 0)
    assert (change, error) == (pytest.approx(0.2), 0)
    _, error = drift([1.0, 2.0, 3.0, 5.0, 5.0, 5.0, 2.0, 2.0, 2.0]) or (0, 0)
    assert error == pytest.approx(math.sqrt(math.pi / 2 / 3) / 2)
