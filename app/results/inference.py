"""Distinguishes a difference between two sides from chance: interval, test, power. It knows numbers only, no database.

The process is the unit of sampling. Steps of one process share its memory layout, hash seed and moment, so that they
are no independent samples; a process counts as one value, which `app.results.sides` chooses.

- The Mann-Whitney U test (Annals of Mathematical Statistics 18, 1947) compares ranks: it needs no normal distribution.
  Its p-values are exact for small samples.
- Sides that took turns have been drawn in blocks (workers/jobs/compare.py). Of such sides the same statistic, of all
  processes, is compared with what it would be by the other orders that could have been drawn, which exchange processes
  within blocks (Fisher, The Design of Experiments, 1935). So its p-values are exact whatever else the host did, and a
  load that is there in one block and not in another takes no power away.
- The ratio is the median of the ratios of each process of one side to each of the other, and its interval holds the
  ratios that this test does not reject (both Hodges & Lehmann, Annals of Mathematical Statistics 34, 1963). The
  interval covers the true ratio at least as often as it says, whatever the distribution of a noise that multiplies
  both sides' values, and it always contains the estimate; the ratio of the two medians may lie outside.
- A comparison tests one metric of each case, its headline. A difference is found if the adjusted p-value is at most
  ALPHA and the interval excludes 1. Other metrics are described by their intervals.
- Holm's procedure (Scandinavian Journal of Statistics 6, 1979) adjusts p-values, so that the probability of any false
  finding stays below ALPHA, however many cases are tested. It is always applied, also where so few processes cannot
  pass it.
- Power follows from the probability that a process of the slower side takes longer than one of the other (Noether,
  Journal of the American Statistical Association 82, 1987). It comes from the distances between processes of one side,
  whatever their distribution: on a busy host a few take far longer than the others, which ranks hardly notice.
"""

import functools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.specs.compare import blocks_of_turns

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
MAX_EXACT_IN_TURNS = 20
"""Likewise of sides that took turns. The normal approximation of more, near ALPHA, is at most 10 % too large."""
SAME = 1e-9
"""Values are proportional if their ratio is constant to this relative precision."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated ratio of two samples, with interval and p-value; None for a value that they do not determine."""

    ratio: float | None
    """The median of the ratios of a process of the candidate to one of the baseline (Hodges & Lehmann)."""
    low: float | None
    high: float | None
    """The interval of the ratio."""
    p_value: float | None
    """Two-sided p-value of the Mann-Whitney U test."""
    distances: Sequence[float] = field(default=(), repr=False)
    """Distances between the logarithms of two processes of one side, of all such pairs, in ascending order."""

    @property
    def spread(self) -> float | None:
        """By how much two processes of one side differ, the median: 0.01 is 1 %."""
        return math.expm1(statistics.median(self.distances)) if self.distances else None

    @property
    def excludes_one(self) -> bool:
        """Return True if the interval does not contain the ratio 1, or if there is no interval."""
        return self.low is None or self.high is None or self.low > 1 or self.high < 1


def estimate(baseline: Sequence[float], candidate: Sequence[float], blocks: Sequence[int] = ()) -> Estimate:
    """Estimate the ratio of two sides from one value per process.

    Below FEWEST processes on a side, only the ratio is known, and the spread if there are at least 2. Where a value is
    not positive, there is no ratio.

    Args:
        baseline: the values of one side, in the order of the turns.
        blocks: the number of turns that each side had in each block, whose sum is that of either side's values; none of
            sides that did not take turns.
    """
    found = interval(baseline, candidate, blocks)
    distances = distances_within(baseline, candidate) if found.ratio is not None else ()
    enough = min(len(baseline), len(candidate)) >= FEWEST
    return replace(found, p_value=p_value(baseline, candidate, blocks) if enough else None, distances=distances)


def interval(baseline: Sequence[float], candidate: Sequence[float], blocks: Sequence[int] = ()) -> Estimate:
    """Return the ratio and its interval alone, as `estimate` does."""
    if min(*baseline, *candidate) <= 0:
        return Estimate(None, None, None, None)
    import numpy as np

    ratios: list[float] = np.sort(np.divide.outer(candidate, baseline), axis=None).tolist()
    ratio = _middle(ratios)
    if min(len(baseline), len(candidate)) < FEWEST:
        return Estimate(ratio, None, None, None)
    if len(blocks) > 1:
        low, high = (_end_in_turns(ends, baseline, candidate, blocks) for ends in (ratios, ratios[::-1]))
        return Estimate(ratio, low, high, None)
    place = _place_of_end(len(baseline), len(candidate))
    if place < 1:  # so few ratios cannot have such a confidence
        return Estimate(ratio, None, None, None)
    return Estimate(ratio, ratios[place - 1], ratios[-place], None)


def _middle(ratios: Sequence[float]) -> float:
    """Return the median of ratios in ascending order: of two in the middle the geometric mean, so that the ratio of
    exchanged sides is the inverse."""
    below, above = ratios[(len(ratios) - 1) // 2], ratios[len(ratios) // 2]
    return below if below == above else min(max(math.sqrt(below) * math.sqrt(above), below), above)


def is_above(baseline: Sequence[float], candidate: Sequence[float]) -> bool:
    """Return True if the candidate's processes tend to have larger values, which may be below 0: if the median of the
    differences of a process of the candidate and one of the baseline is positive."""
    import numpy as np

    return float(np.median(np.subtract.outer(candidate, baseline))) > 0


def distances_within(*sides: Sequence[float]) -> list[float]:
    """Return `Estimate.distances` of these sides."""
    import numpy as np

    logarithms = [np.log(np.asarray(side, dtype=float)) for side in sides]
    of_sides = [np.subtract.outer(side, side)[np.triu_indices(len(side), 1)] for side in logarithms]
    distances: list[float] = np.sort(np.abs(np.concatenate(of_sides))).tolist()
    return distances


@functools.cache
def _place_of_end(baseline: int, candidate: int) -> int:
    """Return the largest k for which the k-th smallest to the k-th largest ratio has CONFIDENCE; 0 if none has."""
    import numpy as np

    pairs = baseline * candidate
    if max(baseline, candidate) > MAX_EXACT:
        error = math.sqrt(pairs * (baseline + candidate + 1) / 12)
        return math.floor((pairs + 1) / 2 - statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error)
    without_ties = tuple(range(1, 2 * (baseline + candidate), 2))
    ways = _ways(without_ties, baseline)[baseline**2 :: 2]  # from the smallest sum on
    below = np.cumsum(ways) / math.comb(baseline + candidate, baseline)
    return int(np.count_nonzero(below <= (1 - CONFIDENCE) / 2))


@functools.lru_cache(maxsize=100)
def _ways(ranks: tuple[int, ...], size: int) -> Any:
    """Return in how many ways so many of these ranks have each sum, as an array from 0 on."""
    import numpy as np

    ways = np.zeros((size + 1, sum(sorted(ranks)[-size:]) + 1))
    ways[0, 0] = 1
    for number, rank in enumerate(ranks, start=1):
        for count in range(min(size, number), 0, -1):
            ways[count, rank:] += ways[count - 1, :-rank]
    return ways[size].copy()  # a view would keep the other rows in the cache, too


def _end_in_turns(
    ratios: Sequence[float], baseline: Sequence[float], candidate: Sequence[float], blocks: Sequence[int]
) -> float:
    """Return the end of the interval: the first of these ratios beyond which the test does not reject. `ratios`: those
    of all pairs, from this end."""

    def holds(place: int) -> bool:
        between = math.sqrt(ratios[place - 1]) * math.sqrt(ratios[place])
        return p_value([between * value for value in baseline], candidate, blocks) > 1 - CONFIDENCE

    return ratios[bisect_left(range(1, (len(ratios) + 1) // 2), True, key=holds)]


def p_value(baseline: Sequence[float], candidate: Sequence[float], blocks: Sequence[int] = ()) -> float:
    """Return the two-sided p-value of the Mann-Whitney U test, among all orders that could have been drawn within the
    blocks; `blocks` as for `estimate`.

    It is exact up to MAX_EXACT processes of a side, in turns MAX_EXACT_IN_TURNS. Of more, the sum of ranks is taken for
    normal: it is that of many processes, or of many independent blocks.
    """
    import numpy as np

    values = [*baseline, *candidate]
    if min(values) == max(values):
        return 1.0
    ordered = np.sort(values)
    ranks = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")  # doubled: ties
    sizes = [(size, size) for size in blocks] if len(blocks) > 1 else [(len(baseline), len(candidate))]
    pools, found, at = [], int(ranks[: len(baseline)].sum()), 0
    for ones, others in sizes:
        other = len(baseline) + at
        pools.append(np.concatenate([ranks[at : at + ones], ranks[other : other + others]]))
        at += ones
    if max(len(baseline), len(candidate)) > (MAX_EXACT_IN_TURNS if len(blocks) > 1 else MAX_EXACT):
        mean = sum(pool.mean() * ones for pool, (ones, _) in zip(pools, sizes, strict=True))
        variances = (
            pool.var(ddof=1) * ones * others / len(pool) for pool, (ones, others) in zip(pools, sizes, strict=True)
        )
        error = math.sqrt(sum(variances))
        excess = max(0.0, abs(found - mean) - 1)  # less half a step of doubled ranks
        return 2 * statistics.NormalDist(0, error).cdf(-excess) if error else 1.0
    share = np.ones(1)
    for pool, (ones, _) in zip(pools, sizes, strict=True):
        ways = _ways(tuple(sorted(pool.tolist())), ones)
        share = np.convolve(share, ways / ways.sum())
    return min(1.0, 2 * float(min(share[: found + 1].sum(), share[found:].sum())))


def smallest_p_value(baseline: int, candidate: int, blocks: Sequence[int] = ()) -> float:
    """Return the p-value of two sides of so many processes that do not overlap: no p-value is smaller."""
    if len(blocks) > 1:
        return 2 / math.prod(math.comb(2 * size, size) for size in blocks)
    return 2 / math.comb(baseline + candidate, baseline)


def smallest_difference(
    distances: Sequence[float], baseline: int, candidate: int, alpha: float = ALPHA, blocks: Sequence[int] = ()
) -> float | None:
    """Return the smallest relative difference that is found with probability POWER: 0.02 is 2 %. None if so few
    processes cannot find any difference, however large, or there are no `Estimate.distances`. `alpha`: the p-value that
    the test has to reach, before it is adjusted."""
    if min(baseline, candidate) < FEWEST or smallest_p_value(baseline, candidate, blocks) > alpha or not distances:
        return None
    share = _standard_errors(alpha) * math.sqrt((baseline + candidate) / (3 * baseline * candidate))
    return math.expm1(distances[math.ceil(min(1.0, share) * len(distances)) - 1])


def replicates_for(difference: float, distances: Sequence[float], alpha: float = ALPHA) -> int | None:
    """Return how many processes each side needs, so that this relative difference (0.03 is 3 %) is found with
    probability POWER. Half of the processes of the slower side would, but for the difference, take longer than one of
    the other side, and so do those now that would take less by a smaller distance: half of the share of such distances.
    None if there are no smaller distances."""
    smaller = bisect_right(distances, math.log1p(difference))
    if not smaller:
        return None
    number = fewest_for(alpha)
    if smaller < len(distances):
        number = max(number, math.ceil(2 / 3 * (_standard_errors(alpha) * len(distances) / smaller) ** 2))
    return number


def fewest_for(alpha: float) -> int:
    """Return how few processes of each side can reach this p-value in turns, if they do not overlap."""
    number = FEWEST
    while smallest_p_value(number, number, blocks_of_turns(number)) > alpha:
        number += 1
    return number


def _standard_errors(alpha: float) -> float:
    """Return the difference that is found with probability POWER, in units of its standard error."""
    normal = statistics.NormalDist()
    return normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(POWER)


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis of a comparison: the headline metric of a case."""

    baseline: Sequence[float]
    candidate: Sequence[float]
    p_value: float


def adjusted(tests: Sequence[Hypothesis]) -> tuple[list[float], float]:
    """Return Holm's adjusted p-value of each test, and the p-value that the first of them has to reach.

    Metrics that are proportional to each other, or one to the other's inverse, are one hypothesis and count once:
    tokens_per_s is work divided by the median step_ms. Sides with one and the same value in all processes do not count:
    they cannot differ.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, test in enumerate(tests):
        pattern = _pattern([*test.baseline, *test.candidate])
        if pattern is not None:
            groups.setdefault(pattern, []).append(index)
    p_values = [1.0] * len(tests)
    count = len(groups)
    least = 0.0
    for rank, group in enumerate(sorted(groups.values(), key=lambda group: tests[group[0]].p_value)):
        own = min(1.0, tests[group[0]].p_value * (count - rank))
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
