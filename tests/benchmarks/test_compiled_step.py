"""The comparison of compiled steps works with a small model on a CPU, by jobs and by turns."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from benchmarks import compiled_step, gpu_tables
from benchmarks.compiled_step import Turn

OURS: dict[str, Any] = {
    "kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}, "context_length": 16, "mode": "forward",
    "warmup_steps": 1, "measure_steps": 2, "attention": "eager",
}  # fmt: skip
OTHER = {**OURS, "attention": "sdpa_math", "context_length": 256}


def test_every_backend_has_a_step_to_compare() -> None:
    attentions = {spec["attention"] for spec in gpu_tables.compiled_step()}
    assert {compiled_step.OURS, *compiled_step.BACKENDS} <= attentions


def test_turns_are_paired_by_round() -> None:
    device, turns = compiled_step.by_turns(OURS, OTHER, rounds=6, steps=2)
    assert device == "cpu"
    assert len(turns) == 6
    assert statistics.median(ours.step_ms / other.step_ms for ours, other in turns) < 1, "a sixteenth of the positions"
    assert all(turn.host_ms > 0 for pair in turns for turn in pair)


def test_a_failing_process_ends_the_comparison(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EOFError):
        compiled_step.by_turns(OURS, {**OTHER, "attention": "nobodys"}, rounds=1, steps=1)
    assert "unknown attention implementation" in capfd.readouterr().err


def test_the_ratio_is_that_of_a_round_and_not_of_the_hosts_drift() -> None:
    turns = [(Turn(0.9 * drift, 1.0), Turn(1.0 * drift, 2.0)) for drift in (50, 60, 70, 80, 90, 100, 110)]
    assert compiled_step.row("sdpa_flash", turns) == [
        "sdpa_flash", "72.0", "80.0", "1.0", "2.0", "0.900 (0.900 to 0.900)",
    ]  # fmt: skip
    mixed = [(Turn(step, 1.0), Turn(10.0, 1.0)) for step in range(1, 21)]
    assert compiled_step.row("", mixed)[-1] == "1.050 (0.600 to 1.500)", "ranks 6 and 15 of 20: David & Nagaraja 2003"


def test_jobs_of_each_round_are_compared() -> None:
    *_, told = compiled_step.by_jobs(OURS, [OTHER], rounds=2)
    print(told)
    (step,) = [re.split(r" *\| *", line) for line in told.splitlines() if "| step_ms " in line]
    assert float(step[7]) < 1, "the ratio: a sixteenth of the positions"
    assert "2 processes each" in told
