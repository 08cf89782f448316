"""The table `fit`: latency and bandwidth of collective operations, fitted to their times."""

from collections.abc import Mapping, Sequence

from parallel.bucket_size import Line, fit
from workers.measure.table import Column, Scalar

Times = dict[tuple[str, str], dict[int, list[float]]]
"""Seconds of the calls of each operation and data type, by bytes of the full tensor, on the slowest rank."""
FIT_COLUMNS = Column.parse(
    "operation, dtype, sizes: integer, latency_us: number µs, latency_low_us: number µs, "
    "latency_high_us: number µs, gb_per_s: number GB/s, gb_per_s_low: number GB/s, gb_per_s_high: number GB/s, "
    "largest_error_percent: number %, note"
)
"""Latency and algorithm bandwidth with their 95 % intervals, and the largest relative error of the line at a size."""
BENT = 0.25
"""The largest relative error of a line that says what calls take."""
NO_LINE = "no line goes through these times: calls of small and of large tensors work in other ways"


def fit_rows(times: Times, seed: int) -> list[list[Scalar]]:
    """Return a row for each operation and data type; without values, and with the reason, if there are few sizes."""
    return [[operation, dtype, len(of_size), *fitted(of_size, seed)] for (operation, dtype), of_size in times.items()]


def fitted(times: Mapping[int, Sequence[float]], seed: int) -> list[Scalar]:
    """Return the values of one fit, and its note."""
    try:
        found = fit(times, seed)
    except ValueError as error:
        return [*[None] * 7, str(error)]
    latencies = [1e6 * one for one in found.interval(lambda line: line.latency_s)]
    note = None
    if found.largest_error > BENT:
        note = NO_LINE
    elif max(map(len, times.values())) == 1:
        note = "one call of each size: the intervals have no width, and say nothing"
    elif found.line.latency_s == 0:
        note = "the sizes are too large to show a latency: add small ones"
    low, high = found.interval(lambda line: line.s_per_byte)
    return [
        1e6 * found.line.latency_s,
        *latencies,
        rate(found.line),
        1e-9 / high if high else None,
        1e-9 / low if low else None,
        100 * found.largest_error,
        note,
    ]


def rate(line: Line) -> float | None:
    """Return GB/s; None if sizes make no difference."""
    return 1e-9 / line.s_per_byte if line.s_per_byte else None
