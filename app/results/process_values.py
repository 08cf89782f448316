"""The one value by which each process of a comparison counts: a statistic of equally many samples on both sides.

A minimum falls, and a median of skewed times settles, with the number of samples: of identical code the process with
more of them would look faster. So of all processes of a case, on both sides, the first samples count, as many as the
process with the fewest has. Those are successive ones everywhere: samples drawn from a longer time would depend less on
each other, and their minimum would be smaller.

Rates were derived from the median time of a process. In a comparison they follow the statistic of that time, so that
both tell the same. Other statistics of the same samples are witnesses: if two of three steps become slower, the fastest
does not show it, and the median does.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.metrics import DIFFERENCES, TIMES, is_rate
from app.results.cases import CaseOfJob
from app.store.reading.packed import unpack

Rows = Sequence[Any]
Statistic = Literal["fastest", "median"]
_OF: Mapping[str, Callable[[Sequence[float]], float]] = {
    "fastest": min,
    "median": statistics.median,
    "mean": statistics.fmean,
}
_WHOLES = ("step_ms", "latency_ms", "forward_backward_ms", "forward_ms", "product_ms", "copy_ms")
"""The times of the whole work: of a case the first that it has."""


@dataclass(frozen=True)
class ProcessValues:
    """The measurements of a metric on both sides, whose `value` is what the process counts as."""

    sides: tuple[Rows, Rows]
    statistic: Statistic | None = None
    """None if each process has a single value."""
    samples: int | None = None
    """The number of samples of each process that count."""
    cut_from: int | None = None
    """The largest number of samples of a process, if some of them do not count."""
    witnesses: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Values by other statistics of the same samples."""
    unequal: str | None = None
    """Why equally many samples could not be taken; then the values are of all samples."""


def process_values(cases: tuple[CaseOfJob | None, CaseOfJob | None], metric: str, *, fastest: bool) -> ProcessValues:
    """Return the values of a metric, named as its column, of the processes of a case's two sides.

    fastest: take the fastest sample of times; False: the median.
    """
    sides = (_rows(cases[0], metric), _rows(cases[1], metric))
    rows = [*sides[0], *sides[1]]
    if not rows or any(row.outcome != "ok" or row.value is None for row in rows):
        return ProcessValues(sides)
    time = time_of(rows[0], cases) if is_rate(metric, rows[0].unit) and all(row.n == 1 for row in rows) else None
    if time is not None:
        return _of_rates(sides, process_values(cases, time, fastest=fastest), cases, time)
    if all((row.n or 1) == 1 for row in rows):
        return ProcessValues(sides)
    is_time = rows[0].unit in TIMES and metric not in DIFFERENCES
    return _of_samples(sides, "fastest" if fastest and is_time else "median", is_time=is_time)


def _rows(case: CaseOfJob | None, metric: str) -> Rows:
    if case is None or (case.stopped is not None and "side" not in case.coordinates):  # a side in turns keeps its own
        return ()
    return case.processes.get(metric, ())


def _of_samples(sides: tuple[Rows, Rows], statistic: Statistic, *, is_time: bool) -> ProcessValues:
    rows = [*sides[0], *sides[1]]
    numbers = {row.n for row in rows}
    fewest, most = min(numbers), max(numbers)
    known = {"fastest": "fastest", "median": "value", "mean": "mean"}
    unequal = None
    if fewest == most:
        by = {name: [getattr(row, field) for row in rows] for name, field in known.items()}
    elif all(row.samples is not None for row in rows):
        first = [[value for value in unpack(row.samples) or () if value is not None][:fewest] for row in rows]
        by = {name: list(map(of, first)) for name, of in _OF.items()}
    else:
        unequal = f"processes have {fewest} to {most} samples, which are not kept: only equally many can be compared"
        statistic, by = "median", {"median": [row.value for row in rows]}
    number = len(sides[0])
    counted = [
        row._replace(value=value, low=None, high=None, n=row.n if unequal else fewest)
        for row, value in zip(rows, by[statistic], strict=True)
    ]
    others = [name for name in by if name not in (statistic, "fastest") and None not in by[name]] if is_time else []
    return ProcessValues(
        (counted[:number], counted[number:]),
        statistic=statistic,
        samples=None if unequal else fewest,
        cut_from=most if fewest < most and not unequal else None,
        witnesses={name: (by[name][:number], by[name][number:]) for name in others},
        unequal=unequal,
    )


def time_of(row: Any, cases: Sequence[CaseOfJob | None]) -> str | None:
    """Return the column of the time that a rate is relative to: that of its phase, or of the whole work."""
    names = _WHOLES if row.phase is None else (f"{row.phase}_ms",)
    found = {next((name for name in names if name in case.processes), None) for case in cases if case is not None}
    return found.pop() if len(found) == 1 else None


def _of_rates(
    sides: tuple[Rows, Rows], times: ProcessValues, cases: tuple[CaseOfJob | None, CaseOfJob | None], time: str
) -> ProcessValues:
    """Return the rates of the statistic that `times` has, since they were derived from the medians."""
    medians = [_by_process(_rows(case, time)) for case in cases]

    def scaled(by: Sequence[Mapping[Any, float]]) -> tuple[list[float], list[float]] | None:
        try:
            one, other = (
                [row.value * median[_process(row)] / value[_process(row)] for row in rows]
                for rows, median, value in zip(sides, medians, by, strict=True)
            )
        except (KeyError, ZeroDivisionError):
            return None
        return one, other

    values = scaled([_by_process(rows) for rows in times.sides])
    if values is None or times.statistic is None:
        return ProcessValues(sides)
    witnesses = {}
    for name, of_times in times.witnesses.items():
        by = [dict(zip(map(_process, rows), its, strict=True)) for rows, its in zip(times.sides, of_times, strict=True)]
        if (of_rates := scaled(by)) is not None:
            witnesses[name] = of_rates
    one, other = (
        [row._replace(value=value) for row, value in zip(*pair, strict=True)]
        for pair in zip(sides, values, strict=True)
    )
    return ProcessValues((one, other), times.statistic, times.samples, times.cut_from, witnesses, times.unequal)


def _process(row: Any) -> tuple[int, int, int]:
    return row.job_id, row.attempt, row.unit_index


def _by_process(rows: Rows) -> dict[tuple[int, int, int], float]:
    return {_process(row): row.value for row in rows}
