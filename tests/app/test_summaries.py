"""The value of a metric of a case."""

import math
import random
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

from app.summaries import MAX_METRICS, NOT_MEASURED, Summary, add_process, summarise, values_of_job
from flopwatch.intervals import median_interval
from tests import builders


class Row(NamedTuple):
    value: float | None = 2.0
    outcome: str = "ok"
    unit_index: int | None = 0
    std: float | None = 0.5
    n: int | None = 10
    low: float | None = None
    high: float | None = None


@pytest.mark.parametrize(
    ("rows", "planned", "stopped", "summary"),
    [
        ([Row()], 1, None, Summary(2.0, 0.5, 10, "ok")),
        ([], 1, None, NOT_MEASURED),
        ([Row(1.0), Row(3.0)], 2, None, Summary(2.0, math.sqrt(2), 2, "ok")),
        ([Row(1.0), Row(None, "oom")], 2, None, Summary(None, None, None, "oom")),
        ([Row(1.0), Row(math.inf)], 2, None, Summary(None, None, 2, "ok")),
        ([Row(math.nan, std=math.nan)], 1, None, Summary(None, None, 10, "ok")),
        ([Row()], 1, "timeout", Summary(2.0, 0.5, 10, "ok")),
        ([Row()], 2, "timeout", Summary(None, None, None, "timeout")),
        ([], 1, "timeout", Summary(None, None, None, "timeout")),
        ([Row(None, "oom")], 2, "timeout", Summary(None, None, None, "oom")),
    ],
)
def test_mean(rows: list[Row], planned: int, stopped: str | None, summary: Summary) -> None:
    assert summarise(rows, planned, stopped, "mean") == summary


def test_a_median_has_its_interval() -> None:
    assert summarise([Row(low=1.5, high=2.1)], 1, None) == Summary(2.0, 0.5, 10, "ok", 1.5, 2.1)
    assert summarise([Row()], 1, None) == Summary(2.0, None, 10, "ok")
    processes = [Row(float(value), low=-1.0, high=100.0) for value in (1, 2, 3, 4, 5, 9)]
    assert summarise(processes, 6, None) == Summary(3.5, 5.5, 6, "ok", 1.0, 9.0), "of the processes' own medians"
    assert summarise(processes[:5], 5, None) == Summary(3.0, None, 5, "ok", least=1.0, greatest=5.0), "their range"


def test_rates_and_times_of_a_row_belong_together() -> None:
    """Processes of 550, 635, 15.5 and 18.5 ms printed 284.4 ms beside 14268 tokens/s: the middle of two rates."""
    work = 512.0
    for of in ([550.0, 635.0, 15.5, 18.5], [1.0, 2.0, 9.0], [3.0, 4.0]):
        times = summarise([Row(1e-3 * ms) for ms in of], len(of), None)
        rates = summarise([Row(work / (1e-3 * ms)) for ms in of], len(of), None, rate=True)
        assert rates.value == pytest.approx(work / times.value)
        assert (times.least, times.greatest) == (1e-3 * min(of), 1e-3 * max(of))
    assert summarise([Row(0.0), Row(4.0)], 2, None, rate=True).value == 2.0


def covered(n: int, place: int) -> Fraction:
    """The probability that the median lies from the place-th smallest to the place-th largest of n numbers."""
    return 1 - 2 * Fraction(sum(math.comb(n, k) for k in range(place)), 2**n)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 10, 30, 100, 999, 1000, 1001, 2000])
def test_the_interval_is_the_narrowest_that_covers_the_median(n: int, rng: random.Random) -> None:
    numbers = list(range(1, n + 1))
    rng.shuffle(numbers)
    low, high = median_interval(numbers) or (0, 0)
    assert high == n + 1 - low
    assert covered(n, int(low)) >= 0.95
    assert covered(n, int(low) + (1 if n <= 1000 else 2)) < 0.95, "of many numbers, one place may be given away"


def test_five_numbers_are_too_few_for_an_interval() -> None:
    assert covered(5, 1) < 0.95
    assert median_interval([1.0] * 5) is None


@pytest.mark.parametrize(("statistic", "value"), [("min", 1.0), ("max", 6.0), ("p25", 1.5)])
def test_other_statistics_have_no_spread(statistic: Any, value: float) -> None:
    assert summarise([Row(1.0), Row(2.0), Row(6.0)], 3, None, statistic) == Summary(value, None, 3, "ok")


def test_a_units_first_ok_measurement_counts() -> None:
    rows: list[Any] = []
    for row in (Row(None, "crashed"), Row(1.0), Row(2.0), Row(3.0, unit_index=1), Row(4.0, unit_index=None)):
        add_process(rows, row)
    assert [row.value for row in rows] == [1.0, 3.0, 4.0]


def test_values_of_a_job_with_one_case() -> None:
    records = [
        builders.measurement("forward_ms", 1.0),
        builders.measurement("tflops", 3.0, phase="forward"),
        builders.measurement("step_ms", 2.0),
        builders.measurement("step_ms", 4.0, unit_index=1),
        builders.measurement("backward_ms", None),
        builders.measurement("mfu", math.nan, phase=None),
    ]
    assert values_of_job(records, 1, None) == {"forward_ms": 1.0, "forward_tflops": 3.0, "step_ms": 3.0}
    assert values_of_job(records, 2, "timeout") == {"step_ms": 3.0}


def test_a_job_with_several_cases_has_no_values() -> None:
    records = [builders.measurement(case={"context_length": length}) for length in (64, 128)]
    assert (values_of_job(records, 1, None), values_of_job([], 1, None)) == (None, None)


def test_a_job_of_very_many_metrics_has_no_values() -> None:
    """A list reads the row of each of its jobs."""
    records = [builders.measurement("tflops", 1.0, phase=f"phase{number}") for number in range(MAX_METRICS + 1)]
    assert len(values_of_job(records[:-1], 1, None) or {}) == MAX_METRICS
    assert values_of_job(records, 1, None) is None
