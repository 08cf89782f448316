"""Summaries of samples. Quantiles interpolate linearly between order statistics (Hyndman & Fan's type 7)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EXACT_BINOMIAL_LIMIT = 1000


@dataclass(frozen=True)
class Summary:
    """Statistics of n samples, in the samples' unit."""

    n: int
    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for one sample."""
    median: float
    min: float
    max: float
    p05: float
    p25: float
    p75: float
    p95: float


def summarize(samples: Sequence[float]) -> Summary:
    """Compute statistics of at least one sample.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    if not samples:
        raise ValueError("no samples")
    if not all(map(math.isfinite, samples)):
        raise ValueError("a sample is not finite")
    ordered = sorted(samples)
    n = len(ordered)
    mean = math.fsum(ordered) / n
    std = math.sqrt(math.fsum((sample - mean) ** 2 for sample in ordered) / (n - 1)) if n > 1 else None
    return Summary(
        n=n,
        mean=mean,
        std=std,
        median=quantile(ordered, 0.5),
        min=ordered[0],
        max=ordered[-1],
        p05=quantile(ordered, 0.05),
        p25=quantile(ordered, 0.25),
        p75=quantile(ordered, 0.75),
        p95=quantile(ordered, 0.95),
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile, 0 ≤ q ≤ 1, of samples in ascending order."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median_interval(samples: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return a confidence interval of the median, with no assumption on the distribution.

    Its ends are two order statistics, as close as `level` allows: the number of samples below the median is binomial(n,
    1/2). Samples must be independent. Steps within one process are not, so use it on values of several processes.

    Returns:
        (low, high), or None where even (minimum, maximum) covers less than `level` (n < 6 for 0.95).
    """
    ordered = sorted(samples)
    n = len(ordered)
    tail = (1 - level) / 2
    if n > EXACT_BINOMIAL_LIMIT:
        rank = math.floor(n / 2 - statistics.NormalDist().inv_cdf(1 - tail) * math.sqrt(n) / 2)
        return ordered[rank - 1], ordered[n - rank]
    # The largest rank r with P(fewer than r samples lie below the median) ≤ tail.
    rank, below = 0, 0
    while (below + math.comb(n, rank)) / 2**n <= tail:
        below += math.comb(n, rank)
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def coefficient_of_variation(samples: Sequence[float]) -> float | None:
    """Return standard deviation over mean; None for fewer than two samples or a mean of 0."""
    if len(samples) < 2:
        return None
    mean = math.fsum(samples) / len(samples)
    return statistics.stdev(samples, mean) / abs(mean) if mean else None


def drift(samples: Sequence[float]) -> float | None:
    """Return the median of the last third over that of the first third, less 1; None for fewer than 9 samples."""
    third = len(samples) // 3
    if third < 3:
        return None
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    return last / first - 1 if first else None
