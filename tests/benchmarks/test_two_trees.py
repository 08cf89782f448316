"""Rows of two checkouts side by side."""

from typing import Any

from benchmarks.two_trees import compared, rows_of


def measured(length: int, median: float | None, phase: str | None = None, metric: str = "forward_ms") -> dict[str, Any]:
    case = {"implementation": "eager", "length": length}
    return {"case": case, "unit_index": 0, "metric": metric, "phase": phase, "median": median, "n": 5, "validity": "ok"}


def test_cases_and_phases_of_one_metric_have_rows_of_their_own() -> None:
    tflops = [measured(8, 3.0, None, "tflops"), measured(8, 4.0, "backward", "tflops")]
    rows = rows_of([measured(8, 1.0, "forward"), measured(16, 2.0, "forward"), measured(32, None), *tflops])
    assert {name: row[0] for name, row in rows.items()} == {
        "length=8, forward_ms": 1.0, "length=16, forward_ms": 2.0, "length=8, tflops": 3.0,
        "length=8, backward, tflops": 4.0,
    }  # fmt: skip
    assert [*rows_of([measured(8, 1.0)])] == ["forward_ms"]


def test_the_ratio_is_of_medians_and_the_spread_of_one_checkout() -> None:
    old, new = ([rows_of([measured(8, time)]) for time in times] for times in ((1.0, 2.0, 3.0), (4.0, 4.0, 5.0)))
    assert compared("forward_ms", old, new) == ["forward_ms", "2", "4", "2.0000", "200.0%", "5 → 5", "ok → ok"]
