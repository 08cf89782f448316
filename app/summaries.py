"""The value of a metric of a case, from the measurements of the processes (units of a job) that measured it.

It is a statistic of the samples. If several processes measured the case, each counts as one value: the statistic of the
processes' own statistics, such as the median of their medians. A median comes with its interval (`median_interval`), a
mean with the standard deviation: of the samples, or of the processes' medians or means. No average hides a missing
value: when one process has none, the metric has an outcome ("oom", "unsupported", …) instead of numbers. If the job did
not succeed, a metric that all planned processes measured has its value, and every other has the job's code ("timeout",
"cancelled", …) as its outcome.

Of a job that ran several times, the measurements are those of the last attempt that recorded results.

Standard library only.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from app.metrics import column_name, is_rate
from flopwatch.intervals import FEWEST_FOR_INTERVAL, median_interval
from flopwatch.table_options import DEFAULT_STATISTIC, Statistic
from flopwatch.text.numbers import finite


class Measured(Protocol):
    """A process's measurement of a metric of a case."""

    @property
    def unit_index(self) -> int | None: ...
    @property
    def outcome(self) -> str: ...
    @property
    def value(self) -> float | None:
        """The statistic of its samples."""

    @property
    def std(self) -> float | None: ...
    @property
    def low(self) -> float | None:
        """The lower end of the interval of the median, and `high` the upper one; read for that statistic only."""

    @property
    def high(self) -> float | None: ...
    @property
    def n(self) -> int | None: ...


class Summary(NamedTuple):
    """The value of a metric of a case."""

    value: float | None
    spread: float | None
    """Beside a mean: the standard deviation of the samples, or of the processes' means. Beside a median: the larger
    distance to an end of its interval."""
    n: int | None
    """Number of samples, or of processes."""
    outcome: str | None
    """ok | oom | unsupported | timeout | …; None: not measured."""
    low: float | None = None
    """The interval of a median; None beside other statistics, and of fewer than FEWEST_FOR_INTERVAL numbers."""
    high: float | None = None
    least: float | None = None
    """The range of the numbers, from 2 to FEWEST_FOR_INTERVAL - 1, that a median summarises; else None."""
    greatest: float | None = None


NOT_MEASURED = Summary(None, None, None, None)


def add_process(rows: list[Any], row: Measured) -> None:
    """Add a measurement to those of the other processes of a metric of a case. A crash may leave two rows of one unit:
    the first that is "ok" counts. Each row without a unit is a process of its own."""
    for index, earlier in enumerate(rows):
        if row.unit_index is not None and earlier.unit_index == row.unit_index:
            if earlier.outcome != "ok" and row.outcome == "ok":
                rows[index] = row
            return
    rows.append(row)


def summarise(
    rows: Sequence[Measured],
    planned: int,
    stopped: str | None,
    statistic: Statistic = DEFAULT_STATISTIC,
    *,
    rate: bool = False,
) -> Summary:
    """Return the value of a metric of a case.

    Args:
        rows: the measurements, one of each process, as `add_process` gathers them.
        planned: the number of processes that were planned to measure the case.
        stopped: the code of why the job did not succeed; None if it did.
        statistic: the statistic that `value` of the rows is.
        rate: the metric is work divided by a time. Its median is then that of the times: of an even number of
            processes work divided by the mean of the two times in the middle, as the time beside it says.
    """
    if stopped is not None and (not rows or (len(rows) < planned and all(row.outcome == "ok" for row in rows))):
        return Summary(None, None, None, stopped)
    if not rows:
        return NOT_MEASURED
    if len(rows) == 1 and rows[0].outcome == "ok":  # nearly always
        row = rows[0]
        interval = None if row.low is None or row.high is None else (row.low, row.high)
        ends = (getattr(row, "fastest", None), getattr(row, "slowest", None))
        return _with_spread(row.value, row.std, interval, row.n, statistic, ends)
    if (outcome := worst_outcome(rows)) != "ok":
        return Summary(None, None, None, outcome)
    values = [finite(row.value) for row in rows]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Summary(None, None, len(values), "ok")
    if rate and statistic == "median" and min(known) > 0:
        value = statistics.median_low(known)
        if len(known) % 2 == 0:
            value = 2 / (1 / value + 1 / statistics.median_high(known))
    else:
        value = _STATISTICS[statistic](known)
    ends = (min(known), max(known))
    return _with_spread(value, statistics.stdev(known), median_interval(known), len(known), statistic, ends)


def _with_spread(
    value: float | None,
    std: float | None,
    interval: tuple[float, float] | None,
    n: int | None,
    statistic: Statistic,
    ends: tuple[float | None, float | None],
) -> Summary:
    """Return the summary with the spread that belongs to the statistic. `ends`: the smallest and the largest number."""
    value = finite(value)
    if statistic == "mean":
        return Summary(value, finite(std), n, "ok")
    if statistic != "median" or interval is None or value is None:
        has_range = statistic == "median" and value is not None and 1 < (n or 0) < FEWEST_FOR_INTERVAL
        least, greatest = ends if has_range and None not in ends else (None, None)
        return Summary(value, None, n, "ok", least=least, greatest=greatest)
    low, high = interval
    return Summary(value, max(value - low, high - value), n, "ok", low, high)


def worst_outcome(rows: Iterable[Measured]) -> str:
    """Return the outcome of the first process that has no value; "ok" if all have one."""
    return next((row.outcome for row in rows if row.outcome != "ok"), "ok")


def planned_processes(spec: Any) -> int:
    """Return how many processes measure a case of a stored spec."""
    replicates = spec.get("replicates") if isinstance(spec, dict) else None
    return replicates if isinstance(replicates, int) else 1


MAX_METRICS = 1000
"""Largest number of metrics by which lists sort a job: its row holds their values."""


class _Process(NamedTuple):
    """A record's measurement, with its median."""

    unit_index: int
    outcome: str
    value: float | None
    n: int | None
    std: None = None
    low: None = None
    high: None = None


def values_of_job(records: Iterable[Any], planned: int, stopped: str | None) -> Mapping[str, float] | None:
    """Return the value of each metric of a job with a single case, by column, as tables show it by default; metrics
    without one are left out. None if an attempt's records have no case, several, or more than MAX_METRICS metrics.
    `planned` and `stopped` as for `summarise`."""
    case: tuple[str, str] | None = None
    rows: dict[str, list[_Process]] = {}
    for record in records:
        if case is None:
            case = (record.case_key, record.device_key)
        elif case != (record.case_key, record.device_key):
            return None
        process = _Process(record.unit_index, record.outcome, record.median, record.n)
        add_process(rows.setdefault(column_name(record.metric, record.phase), []), process)
        if len(rows) > MAX_METRICS:
            return None
    if case is None:
        return None
    values = {
        name: summarise(of_metric, planned, stopped, rate=is_rate(name, None)).value for name, of_metric in rows.items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _quantile(percent: int) -> Callable[[Sequence[float]], float]:
    return lambda values: statistics.quantiles(values, n=20, method="inclusive")[percent // 5 - 1]


_STATISTICS: dict[Statistic, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "p05": _quantile(5),
    "p25": _quantile(25),
    "p75": _quantile(75),
    "p95": _quantile(95),
}
