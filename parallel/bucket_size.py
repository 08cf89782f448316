"""What do buckets of gradients add to a step? Latency and bandwidth of calls, and what calls leave exposed. No torch.

A call on x bytes takes o + x / w: latency o, bandwidth w (Hockney, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", 1994, equation 1). A backward pass makes gradients evenly; a bucket is ready when its last gradient is,
and its call begins when the call before has ended. Of n equal buckets with s bytes in all, whose gradients take as long
as they travel, n · o + s / (n · w) is exposed (Stanford CS336, assignment 2, problem ddp_bucketed_benchmarking).
"""

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


def exposed(line: Line, buckets: Sequence[float], backward_s: float) -> float:
    """Return the seconds by which communication ends after the backward pass.

    Args:
        buckets: Bytes of each bucket, in the order in which they are full.
        backward_s: Time of the backward pass without communication.
    """
    s_per_byte = backward_s / sum(buckets)
    ready = ended = 0.0
    for size in buckets:
        ready += size * s_per_byte
        ended = max(ended, ready) + line.seconds(size)
    return ended - backward_s
