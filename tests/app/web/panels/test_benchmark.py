"""What the panels of a benchmark draw, from its measurements."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.web.panels.benchmark import by_process, draw_phases, medians, panels


def row(metric: str, median: float | None, phase: str | None = None, unit: int = 0) -> dict[str, Any]:
    outcome = "ok" if median is not None else "oom"
    return {"metric": metric, "phase": phase, "median": median, "outcome": outcome, "unit_index": unit}


STEP = [row("forward_ms", 2.0, "forward"), row("backward_ms", 3.0, "backward"), row("step_ms", 6.0, "step")]


def test_the_rest_of_a_step_is_drawn() -> None:
    assert medians(STEP) == {"forward": 2.0, "backward": 3.0, "rest of the step": 1.0}
    assert medians(STEP[:2]) == {"forward": 2.0, "backward": 3.0}
    assert medians([*STEP[:2], row("step_ms", 4.0, "step")]) == {"forward": 2.0, "backward": 3.0}


def test_after_the_prompt_the_rest_is_decoding() -> None:
    rows = [row("prefill_ms", 1.0, "prefill"), row("decode_ms_per_token", 0.5, "decode"), row("step_ms", 5.0, "step")]
    assert medians(rows) == {"prefill": 1.0, "decoding": 4.0}


def test_phases_of_the_users_own_code_are_drawn_after_ours() -> None:
    rows = [row("data_ms", 0.5, "data"), row("rest_ms", 0.5, "rest"), *STEP, row("first_step_ms", 9.0, "first_step")]
    assert medians(rows) == {"forward": 2.0, "backward": 3.0, "data": 0.5, "rest of the step": 0.5}
    columns = draw_phases(by_process(rows))["table"]["columns"]
    assert columns == ["bar", "forward (ms)", "backward (ms)", "data (ms)", "rest of the step (ms)"]


def test_the_rest_of_the_users_own_step_is_that_of_the_table() -> None:
    """Phases that are slow in every other step: their medians add up to half of the step's."""
    rows = [row("decode_ms", 320.0, "decode"), row("rest_ms", 0.363, "rest"), row("step_ms", 640.0, "step")]
    assert medians(rows) == {"decode": 320.0, "rest of the step": 0.363}


def test_a_bar_for_each_process() -> None:
    processes = by_process([*STEP, row("forward_ms", 4.0, "forward", unit=1)])
    figure = draw_phases(processes)
    assert figure["table"] == {
        "columns": ["bar", "forward (ms)", "backward (ms)", "rest of the step (ms)"],
        "rows": [["process 1", 2.0, 3.0, 1.0], ["process 2", 4.0, None, None]],
    }


@pytest.mark.parametrize(("processes", "reported"), [(64, False), (70, True)])
def test_left_out_processes_are_reported(processes: int, reported: bool) -> None:
    rows = [
        row(*measured, unit=unit)
        for unit in range(processes)
        for measured in (("forward_ms", 2.0, "forward"), ("peak_memory_mib", 100.0))
    ]
    found: Any = SimpleNamespace(measurements=rows)
    for panel in panels(found):
        assert panel.text.endswith(" Drawn: the first 64 of 70 processes.") == reported, panel.name
        assert len(panel.draw()["table"]["rows"]) == 64
