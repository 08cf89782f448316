"""The value of a metric of a case."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from app.summaries import MAX_METRICS, NOT_MEASURED, Summary, add_process, planned_processes, summarise, values_of_job
from tests import builders


class Row(NamedTuple):
    value: float | None = 2.0
    outcome: str = "ok"
    unit_index: int | None = 0
    std: float | None = 0.5
    n: int | None = 10


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
def test_summary(rows: list[Row], planned: int, stopped: str | None, summary: Summary) -> None:
    assert summarise(rows, planned, stopped) == summary


@pytest.mark.parametrize(("statistic", "value"), [("median", 2.0), ("min", 1.0), ("max", 6.0), ("p25", 1.5)])
def test_other_statistics_have_no_spread(statistic: Any, value: float) -> None:
    rows = [Row(1.0), Row(2.0), Row(6.0)]
    assert summarise(rows, 3, None, statistic) == Summary(value, None, 3, "ok")


def test_a_units_first_ok_measurement_counts() -> None:
    rows: list[Any] = []
    for row in (Row(None, "crashed"), Row(1.0), Row(2.0), Row(3.0, unit_index=1), Row(4.0, unit_index=None)):
        add_process(rows, row)
    assert [row.value for row in rows] == [1.0, 3.0, 4.0]


def test_planned_processes() -> None:
    assert [planned_processes(spec) for spec in ({"replicates": 3}, {}, {"replicates": None}, None)] == [3, 1, 1, 1]


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
    assert values_of_job(records, 1, None) is None
    assert values_of_job([], 1, None) is None


def test_a_job_of_very_many_metrics_has_no_values() -> None:
    """A list reads the row of each of its jobs."""
    records = [builders.measurement("tflops", 1.0, phase=f"phase{number}") for number in range(MAX_METRICS + 1)]
    assert len(values_of_job(records[:-1], 1, None) or {}) == MAX_METRICS
    assert values_of_job(records, 1, None) is None
