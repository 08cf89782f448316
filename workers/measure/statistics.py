"""Summaries of samples. Quantiles interpolate linearly between order statistics (Hyndman & Fan's type 7)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
