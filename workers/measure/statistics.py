"""Summaries of samples. Quantiles interpolate linearly between order statistics (Hyndman & Fan's type 7)."""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.95
Z95 = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
MOST_FOR_EXACT_PLACE = 1000
FEWEST_FOR_MODES = 10
FEWEST_BLOCKS, BLOCKS = 6, 20
MAX_CORRELATION = 0.9


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
    """Compute statistics of at least one sample. Raises ValueError: no samples, or one that is not finite."""
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


def error_of_median(samples: Sequence[float]) -> float | None:
    """Return the median's larger distance to an end of its 95 % interval, over it; None for fewer than two samples.

    The interval is that of tables (`flopwatch.intervals`): from the k-th smallest to the k-th largest sample; of fewer
    than six samples, over all of them.
    """
    n = len(samples)
    if n < 2 or not (middle := statistics.median(samples)):
        return None
    ordered, k = sorted(samples), _place_of_end(n)
    return max(ordered[n - k] - middle, middle - ordered[k - 1]) / abs(middle)


@functools.cache
def _place_of_end(n: int) -> int:
    """Return k: the largest for which at most k - 1 of n samples are below the median with a probability of at most
    2.5 %, and at least 1 (Conover, Practical Nonparametric Statistics, section 3.2)."""
    if n > MOST_FOR_EXACT_PLACE:  # the normal approximation
        return math.floor((n + 1 - Z95 * math.sqrt(n)) / 2)
    below, k = 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= (1 - COVERAGE) / 2:
        k += 1
    return max(1, k)


def modes(samples: Sequence[float], *, share: float) -> tuple[float, float] | None:
    """Return the means of two groups of samples, if the samples fall into two; None if not, or of fewer than 10.

    The groups are those of the split that leaves the least variance within them (Fisher, On grouping for maximum
    homogeneity, 1958), each with at least a fifth of the samples; between them is at least `share` of the variance.
    """
    n = len(samples)
    if n < FEWEST_FOR_MODES:
        return None
    ordered = sorted(samples)
    sums = list(itertools.accumulate(ordered))
    mean = sums[-1] / n
    total = math.fsum((sample - mean) ** 2 for sample in ordered)
    least = math.ceil(n / 5)
    splits = [(sums[k - 1] / k, (sums[-1] - sums[k - 1]) / (n - k), k) for k in range(least, n - least + 1)]
    low, high, k = max(splits, key=lambda split: split[2] * (n - split[2]) * (split[1] - split[0]) ** 2)
    between = k * (n - k) / n * (high - low) ** 2
    return (low, high) if total > 0 and between >= share * total else None


def drift(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the median of the last third over that of the first third, less 1, and its standard error, if the samples
    of a third are independent; None for fewer than 9 samples."""
    third = len(samples) // 3
    if third < 3:
        return None
    thirds = samples[:third], samples[-third:]
    first, last = map(statistics.median, thirds)
    if not first:
        return None
    # The variance of a median over that of a mean is π / 2 (Serfling, section 2.3.3).
    error = math.sqrt(math.pi / 2 * sum(statistics.variance(one) for one in thirds) / third)
    return last / first - 1, error / abs(first)


def trend(at: Sequence[float], samples: Sequence[float]) -> tuple[float, float]:
    """Return the relative change per second of samples, at least FEWEST_BLOCKS, and its standard error. `at`: the
    moment of each sample in seconds, ascending.

    A line is fitted by least squares to the medians of up to BLOCKS groups of at least three successive samples (of
    fewer, if there are fewer than 18). Its error takes into account that successive deviations depend on each other, as
    those of an autoregressive process of first order.
    """
    count = min(BLOCKS, max(FEWEST_BLOCKS, len(samples) // 3))
    edges = [len(samples) * block // count for block in range(count + 1)]
    moments = [statistics.fmean(at[begin:end]) for begin, end in itertools.pairwise(edges)]
    medians = [statistics.median(samples[begin:end]) for begin, end in itertools.pairwise(edges)]
    level = statistics.median(medians)
    if not level:
        return 0.0, 0.0
    slope, start = statistics.linear_regression(moments, medians)
    rest = [median - start - slope * moment for moment, median in zip(moments, medians, strict=True)]
    squares = math.fsum(value**2 for value in rest)
    correlation = math.fsum(one * next_one for one, next_one in itertools.pairwise(rest)) / squares if squares else 0.0
    correlation = min(max(correlation, 0.0), MAX_CORRELATION)
    spread = math.fsum((moment - statistics.fmean(moments)) ** 2 for moment in moments)
    error = math.sqrt(squares / (count - 2) / spread * (1 + correlation) / (1 - correlation))
    return slope / level, error / level
