"""Distinguishes a difference between two sides from chance: interval, test, power. It knows numbers only, no database.

The process is the unit of sampling. Steps of one process share its memory layout, hash seed and moment, so that they
are no independent samples; a process counts as one value, which `app.results.sides` chooses.

- The Mann-Whitney U test (Annals of Mathematical Statistics 18, 1947) compares ranks: it needs no normal distribution.
  Its p-values are exact for small samples.
- The ratio is the median of those of each process of the candidate to each of the baseline, and its interval holds the
  ratios that this test does not reject (Hodges & Lehmann, Annals of Mathematical Statistics 34, 1963): it covers the
  true ratio at least as often as it says, whatever the distribution of a noise that multiplies both sides' values.
- A comparison tests its headline metric, in all cases. A difference is found if the adjusted p-value is at most ALPHA
  and the interval excludes 1. Other metrics are described by their intervals.
- Holm's procedure (Scandinavian Journal of Statistics 6, 1979) adjusts p-values, so that the probability of any false
  finding stays below ALPHA, however many cases are tested.
- Power follows from the spread between processes, and from the test's efficiency, 3 / pi of that of a test of means
  (Noether, Journal of the American Statistical Association 82, 1987). On a busy host some processes take far longer
  than the others; ranks hardly notice, nor does the spread, by Rousseeuw & Croux's Qn.

SciPy is imported only when something is computed, since the import takes a second.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALPHA = 0.05
"""Upper bound of the probability that a comparison of equal sides finds a difference."""
CONFIDENCE = 0.95
"""Approximate probability that an interval contains the true ratio."""
POWER = 0.8
"""Probability that a difference of the stated size is found."""
FEWEST = 4
"""Fewest processes of each side. With 3, even sides without any overlap have a p-value of 0.1."""
MAX_EXACT = 60
"""Most processes of a side for which p-values and intervals are exact; the normal approximation of more is as good."""
MAX_PERMUTATIONS = 20_000
"""Most ways to divide the values into two sides for which p-values of samples with ties are exact."""
CAUTION = 0.6
"""Power is computed with this upper confidence limit of the spread, since a spread of few processes may be too small
(Browne, Statistics in Medicine 14, 1995)."""
RANK_VARIANCE = math.pi / 3
"""Variance of the Hodges-Lehmann estimate from normal samples, in variances of the difference of their means."""
QUARTILE = 1 / (math.sqrt(2) * statistics.NormalDist().inv_cdf(5 / 8))
"""Standard deviation of a normal distribution, in lower quartiles of the distance between two of its values (Rousseeuw
& Croux, Journal of the American Statistical Association 88, 1993)."""
MAX_REPLICATES = 1_000_000
SAME = 1e-9
"""Values are proportional if their ratio is constant to this relative precision."""


@dataclass(frozen=True)
class Estimate:
    """The estimated ratio of two samples, with interval, p-value and spread; None for a value that they do not
    determine."""

    ratio: float | None
    """Median of the ratios of each process of the candidate to each of the baseline."""
    low: float | None
    high: float | None
    """The interval of the ratio."""
    p_value: float | None
    """Two-sided p-value of the Mann-Whitney U test."""
    spread: float | None
    """Robust standard deviation of the logarithms between processes of one side: 0.01 is 1 %."""

    @property
    def excludes_one(self) -> bool:
        """Return True if the interval does not contain the ratio 1, or if there is no interval."""
        return self.low is None or self.high is None or self.low > 1 or self.high < 1


def estimate(baseline: Sequence[float], candidate: Sequence[float]) -> Estimate:
    """Estimate the ratio of two sides from one value per process.

    Below FEWEST processes on a side, only the ratio is known, and if there are at least 2 the spread. Where a value is
    not positive, there is no ratio.
    """
    positive = min(*baseline, *candidate) > 0
    ratios = _ratios(baseline, candidate) if positive else None
    ratio = None if ratios is None else statistics.median(ratios)
    spread = spread_between(baseline, candidate) if positive else None
    if min(len(baseline), len(candidate)) < FEWEST:
        return Estimate(ratio, None, None, None, spread)
    low = high = None
    if ratios is not None:
        place = _place_of_end(len(baseline), len(candidate))
        low, high = ratios[place - 1], ratios[-place]
    return Estimate(ratio, low, high, p_value(baseline, candidate), spread)


def spread_between(baseline: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Return the standard deviation of the values' logarithms within a side, from the lower quartile of the distances
    between two of them; None without two of one side."""
    import numpy as np

    sides = [np.log(np.asarray(side, dtype=float)) for side in (baseline, candidate)]
    distances = np.concatenate([np.abs(np.subtract.outer(side, side)[np.triu_indices(len(side), 1)]) for side in sides])
    return QUARTILE * float(np.quantile(distances, 0.25)) if len(distances) else None


def _ratios(baseline: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """Return the ratio of each of the candidate's values to each of the baseline's, in ascending order."""
    import numpy as np

    ratios: list[float] = np.sort(np.divide.outer(candidate, baseline), axis=None).tolist()
    return ratios


@functools.cache
def _place_of_end(baseline: int, candidate: int) -> int:
    """Return the largest k for which the interval from the k-th smallest to the k-th largest ratio has CONFIDENCE."""
    import numpy as np

    pairs = baseline * candidate
    if max(baseline, candidate) > MAX_EXACT:
        error = math.sqrt(pairs * (baseline + candidate + 1) / 12)
        return math.floor((pairs + 1) / 2 - statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error)
    # ways[size, total]: in how many ways so many of the ranks so far have that sum, less the smallest possible one
    ways = np.zeros((baseline + 1, pairs + 1))
    ways[0, 0] = 1
    for rank in range(baseline + candidate):
        for size in range(min(baseline, rank + 1), 0, -1):
            if (more := rank + 1 - size) <= pairs:
                ways[size, more:] += ways[size - 1, : pairs + 1 - more]
    below = np.cumsum(ways[baseline]) / math.comb(baseline + candidate, baseline)
    return int(np.count_nonzero(below <= (1 - CONFIDENCE) / 2))


def p_value(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Whitney U test."""
    from scipy import stats

    values = [*baseline, *candidate]
    if min(values) == max(values):
        return 1.0
    method: Any = "asymptotic"
    if len(set(values)) == len(values):
        if max(len(baseline), len(candidate)) <= MAX_EXACT:
            method = "exact"
    elif math.comb(len(values), len(baseline)) <= MAX_PERMUTATIONS:
        return _p_value_of_ties(baseline, candidate)
    return min(1.0, float(stats.mannwhitneyu(baseline, candidate, alternative="two-sided", method=method).pvalue))


def _p_value_of_ties(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the exact two-sided p-value of samples with ties.

    Of all ways to choose the baseline's values, it counts those with each sum of ranks: scipy's permutation test, which
    tries them one by one, takes fifty times as long or more.
    """
    values = sorted([*baseline, *candidate])
    ranks = [bisect_left(values, value) + bisect_right(values, value) for value in values]  # doubled: ties share one
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in baseline)]
    for rank in ranks:
        for size in range(len(baseline), 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + rank] += count
    found = sum(bisect_left(values, value) + bisect_right(values, value) for value in baseline)
    tails = (sum(count for total, count in ways[-1].items() if sign * total >= sign * found) for sign in (1, -1))
    return min(1.0, 2 * min(tails) / math.comb(len(values), len(baseline)))


def smallest_p_value(baseline: int, candidate: int) -> float:
    """Return the p-value of two sides of so many processes that do not overlap: no p-value is smaller."""
    return 2 / math.comb(baseline + candidate, baseline)


def smallest_difference(spread: float, baseline: int, candidate: int, alpha: float = ALPHA) -> float | None:
    """Return the smallest relative difference that is found with probability POWER: 0.02 is 2 %.

    None if so few processes cannot find any difference, however large.

    Args:
        spread: standard deviation of the logarithms between these processes.
        baseline: number of the baseline's processes.
        candidate: number of the candidate's.
        alpha: the p-value that the test has to reach, before it is adjusted.
    """
    if min(baseline, candidate) < FEWEST or smallest_p_value(baseline, candidate) > alpha:
        return None
    cautious = spread_limit(spread, baseline + candidate - 2)
    error = cautious * math.sqrt(RANK_VARIANCE * (1 / baseline + 1 / candidate))
    return math.expm1(_standard_errors(baseline + candidate - 2, alpha) * error)


def spread_limit(spread: float, freedom: int) -> float:
    """Return the upper confidence limit, at CAUTION, of a spread that was estimated with these degrees of freedom."""
    return spread * _limit(freedom)


@functools.cache
def _limit(freedom: int) -> float:
    from scipy import stats

    return math.sqrt(freedom / float(stats.chi2.ppf(1 - CAUTION, freedom)))


def replicates_for(difference: float, spread: float, alpha: float = ALPHA) -> int | None:
    """Return how many processes each side needs, so that this relative difference is found with probability POWER.

    None if they are more than MAX_REPLICATES.

    Args:
        difference: 0.03 is 3 %.
        spread: standard deviation of the logarithms between processes; for an estimated spread, its `spread_limit`.
        alpha: as for `smallest_difference`.
    """
    wanted = 2 * RANK_VARIANCE * (spread / math.log1p(difference)) ** 2
    number = FEWEST
    while smallest_p_value(number, number) > alpha:
        number += 1
    # The number of degrees of freedom grows with the number itself: more processes than this are never needed.
    while (needed := math.ceil(wanted * _standard_errors(2 * number - 2, alpha) ** 2)) > number:
        if needed > MAX_REPLICATES:
            return None
        number = max(number + 1, math.ceil(wanted * _standard_errors(2 * needed - 2, alpha) ** 2))
    return number


@functools.lru_cache(maxsize=4096)
def _standard_errors(freedom: int, alpha: float) -> float:
    """Return the difference that is found with probability POWER, in units of its standard error."""
    from scipy import stats

    return float(stats.t.ppf(1 - alpha / 2, freedom) + stats.t.ppf(POWER, freedom))


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis of a comparison: the headline metric of a case."""

    baseline: Sequence[float]
    candidate: Sequence[float]
    p_value: float


def adjusted(tests: Sequence[Hypothesis]) -> tuple[list[float], float]:
    """Return Holm's adjusted p-value of each test, and the p-value that the first of them has to reach.

    Metrics that are proportional to each other, or one to the other's inverse, are one hypothesis and count once:
    tokens_per_s is work divided by step_ms. Sides with one and the same value in all processes do not count: they
    cannot differ. If the correction is so large that no outcome of so few processes could pass it, none is applied.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, test in enumerate(tests):
        pattern = _pattern([*test.baseline, *test.candidate])
        if pattern is not None:
            groups.setdefault(pattern, []).append(index)
    p_values = [1.0] * len(tests)
    smallest = min((smallest_p_value(len(test.baseline), len(test.candidate)) for test in tests), default=1.0)
    count = len(groups) if smallest * len(groups) <= ALPHA else 1
    least = 0.0
    for rank, group in enumerate(sorted(groups.values(), key=lambda group: tests[group[0]].p_value)):
        own = min(1.0, tests[group[0]].p_value * max(1, count - rank))
        least = max(least, own)
        for index in group:
            p_values[index] = least
    return p_values, ALPHA / max(1, count)


def _pattern(values: Sequence[float]) -> tuple[float, ...] | None:
    """Return a key that proportional and inversely proportional samples share; None if all values are equal."""
    if min(values) == max(values):
        return None
    if min(values) <= 0:
        return tuple(values)
    logarithms = [math.log(value) for value in values]
    mean = statistics.fmean(logarithms)
    centred = [value - mean for value in logarithms]
    largest = max(centred, key=abs)
    return tuple(round(math.copysign(1, largest) * value / SAME) for value in centred)
