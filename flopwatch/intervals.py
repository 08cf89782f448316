"""The interval of a median. Standard library only."""

import functools
import math
import statistics
from collections.abc import Sequence

COVERAGE = 0.95
FEWEST_FOR_INTERVAL = 6
"""The extremes of fewer numbers cover the median with a lower probability than COVERAGE."""
MOST_FOR_EXACT_PLACE = 1000


def median_interval(numbers: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that covers the median of the distribution with at least the probability COVERAGE, if the
    numbers are independent; None for fewer than FEWEST_FOR_INTERVAL.

    Its ends are the k-th smallest and the k-th largest number, so nothing is assumed about the distribution (Conover,
    Practical Nonparametric Statistics, section 3.2).
    """
    if len(numbers) < FEWEST_FOR_INTERVAL:
        return None
    ordered, place = sorted(numbers), _place_of_end(len(numbers))
    return ordered[place - 1], ordered[-place]


@functools.cache
def _place_of_end(n: int) -> int:
    """Return the largest k for which the median is below the k-th smallest of n numbers with a probability of at most
    (1 - COVERAGE) / 2, where the number of smaller ones has the binomial distribution (n, 1/2)."""
    if n > MOST_FOR_EXACT_PLACE:  # the normal approximation, with its continuity correction
        return math.floor((n + 1 - statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2) * math.sqrt(n)) / 2)
    below, k = 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= (1 - COVERAGE) / 2:
        k += 1
    return k
