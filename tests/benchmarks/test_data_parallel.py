"""The benchmark of data parallelism: its table, and that a strategy that fails costs itself only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import data_parallel
from benchmarks.data_parallel import STRATEGIES, pooled, print_table, run_all
from parallel.process_group import RanksFailed


def result(strategy: str, step_ms: list[float], loss: float) -> dict[str, Any]:
    found = {"step_ms": step_ms, "peak_gib": 1.5, "loss": loss}
    return {"strategy": strategy, "seconds": 1.0, "fp32": found, "bf16": found}


def test_a_row_has_medians_over_all_rounds_and_tells_a_wrong_loss(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("none", [10, 12, 11], 5.8),
        result("naive", [20, 22], 5.92),
        result("flat", [18], 5.8),
        result("overlapped", [19], 5.921),
        result("naive", [30], 5.92),
    ]
    assert pooled(results, "naive", "fp32", "step_ms") == 22
    print_table(results, ["none", "naive", "flat", "overlapped", "fsdp"])
    rows = capsys.readouterr().out.splitlines()[-5:]
    assert rows[0] == "| none | 11.0 | +0.0 | 1.5 | 11.0 | +0.0 | 1.5 | 5.8000 |"
    assert rows[1] == "| naive | 22.0 | +11.0 | 1.5 | 22.0 | +11.0 | 1.5 | 5.9200 |"
    assert rows[2].endswith("| 5.8000 WRONG |")
    assert rows[3].endswith("| 5.9210 |")
    assert rows[4] == "| fsdp |  |  |  |  |  |  |  |"


def test_a_strategy_that_fails_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches: list[list[str]] = []

    def launch(
        function: Any, settings: Any, tasks: list[str], *, reported: Callable[[int, Any], None], **options: Any
    ) -> None:
        launches.append(tasks)
        for task in tasks:
            if task == "flat":
                raise RanksFailed(1, "died after step 3")
            reported(0, result(task, [1.0], 5.0))

    monkeypatch.setattr(data_parallel, "launch", launch)
    tasks = ["none", "flat", "naive"] * 2
    results = run_all({"budget_s": 60.0, "bandwidths": [1]}, tasks, 2, "gloo")
    assert launches == [tasks, ["naive", "none", "naive"]]
    assert [one["strategy"] for one in results] == ["none", "flat", "naive", "none", "naive"]
    assert "rank 1 died after step 3" in results[1]["error"]
    assert "flat failed" in capsys.readouterr().out


def test_ours_and_torchs_are_there() -> None:
    assert {"none", "naive", "flat", "overlapped", "torch fsdp", "fsdp"} <= set(STRATEGIES)
