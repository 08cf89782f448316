"""How large should a bucket of gradients be? Latency and bandwidth of calls, and what buckets add to a step. No torch.

A call on x bytes takes o + x / w: latency o, bandwidth w (Hockney, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", 1994, equation 1). A backward pass of T seconds makes s bytes of gradients evenly, in n = s / b buckets
of b bytes: bucket i is ready at i · T / n, and its call, of t = o + b / w, begins when the call before has ended. The
last one ends t + (n - 1) · max(0, t - T / n) after the backward pass. That is what all calls take, n · o + s / w, less
what the backward pass hides. Where a bucket's gradients take as long as they travel, it is n · o + b / w (Stanford
CS336, assignment 2, problem ddp_bucketed_benchmarking).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

DRAWS = 200
"""How often the calls of each size are drawn again, for intervals."""
LEAST_SIZES = 3
"""Sizes that a fit with an error needs."""


@dataclass(frozen=True)
class Line:
    """o + x / w."""

    latency_s: float
    s_per_byte: float

    def seconds(self, size: float) -> float:
        """Return the time of a call on so many bytes."""
        return self.latency_s + size * self.s_per_byte


@dataclass(frozen=True)
class Fit:
    """A line through the median times of several sizes, and lines through times that were drawn again from them."""

    line: Line
    drawn: Sequence[Line]
    errors: Mapping[int, float]
    """(fitted - median) / median of each size."""

    @property
    def largest_error(self) -> float:
        """The largest of the relative errors."""
        return max(map(abs, self.errors.values()))

    def interval(self, value: Callable[[Line], float]) -> tuple[float, float]:
        """Return the 95 % interval of what follows from the line (bootstrap: Efron, 1979)."""
        found = sorted(value(line) for line in self.drawn)
        cut = math.ceil(0.025 * len(found)) - 1
        return found[cut], found[-1 - cut]


def fit(times: Mapping[int, Sequence[float]], seed: int = 0) -> Fit:
    """Fit latency and bandwidth by least squares of relative errors.

    Args:
        times: Seconds of the calls of each size in bytes.
        seed: Of the draws.

    Raises:
        ValueError: fewer than LEAST_SIZES sizes, or a size or time that is not a positive number.
    """
    if len(times) < LEAST_SIZES:
        raise ValueError(f"{len(times)} sizes: latency and bandwidth need {LEAST_SIZES} at least")
    for size, samples in times.items():
        if not samples or not all(0 < one < math.inf for one in (size, *samples)):
            raise ValueError(f"size {size}: it and the times of its calls must be positive numbers, one at least")
    medians = {size: statistics.median(samples) for size, samples in times.items()}
    line = line_through(medians)
    draw = random.Random(seed)
    drawn = [
        line_through(
            {size: statistics.median(draw.choices(samples, k=len(samples))) for size, samples in times.items()}
        )
        for _ in range(DRAWS)
    ]
    return Fit(line, drawn, {size: line.seconds(size) / median - 1 for size, median in medians.items()})


def line_through(times: Mapping[int, float]) -> Line:
    """Return the line with the least squares of relative errors; neither latency nor time per byte is negative."""
    ones = [1 / seconds for seconds in times.values()]
    sizes = [size / seconds for size, seconds in times.items()]
    one_one, one_size, size_size = (
        sum(one * other for one, other in zip(first, second, strict=True))
        for first, second in ((ones, ones), (ones, sizes), (sizes, sizes))
    )
    determinant = one_one * size_size - one_size**2
    latency = (sum(ones) * size_size - sum(sizes) * one_size) / determinant
    per_byte = (one_one * sum(sizes) - one_size * sum(ones)) / determinant
    if latency < 0:
        return Line(0.0, sum(sizes) / size_size)
    return Line(sum(ones) / one_one, 0.0) if per_byte < 0 else Line(latency, per_byte)


def communication(line: Line, total: int, bucket: float) -> float:
    """Return the seconds of all calls: n · o + s / w."""
    return total / bucket * line.latency_s + total * line.s_per_byte


def exposed(line: Line, total: int, bucket: float, backward_s: float) -> float:
    """Return the seconds by which communication ends after the backward pass.

    Args:
        line: A call's latency and bandwidth.
        total: Bytes of all gradients.
        bucket: Bytes of a bucket, `total` at most.
        backward_s: Time of the backward pass without communication.
    """
    buckets, call = total / bucket, line.seconds(bucket)
    return call + (buckets - 1) * max(0.0, call - backward_s / buckets)


def best_bucket(line: Line, total: int, backward_s: float) -> float:
    """Return the bytes of the bucket with the least exposed communication, `total` at most.

    While calls take longer than their buckets' gradients, that is b · T / s + s · o / b + (s / w - T), least at
    s · √(o / T). From the size on at which they do not, b = o / (T / s - 1 / w), only the last call is exposed, and a
    larger bucket makes that longer.
    """
    sizes = [float(total)]
    if backward_s > 0:
        sizes.append(total * math.sqrt(line.latency_s / backward_s))
        if (spare := backward_s / total - line.s_per_byte) > 0:
            sizes.append(line.latency_s / spare)
    return min(sizes)
