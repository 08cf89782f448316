from __future__ import annotations

import random
import statistics as standard

import numpy as np
import pytest

from workers.measure.statistics import coefficient_of_variation, drift, summarize


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


def test_variation_and_drift() -> None:
    samples = [1.0, 2.0, 3.0]
    assert coefficient_of_variation(samples) == pytest.approx(standard.stdev(samples) / 2)
    assert coefficient_of_variation([1.0]) is None
    assert drift([1.0] * 8) is None
    assert drift([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.2, 1.2, 1.2]) == pytest.approx(0.2)
