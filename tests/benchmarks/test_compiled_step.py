"""The comparison of compiled steps works with a small model on a CPU, by jobs and by turns."""

from __future__ import annotations

import argparse
import re
import statistics
from typing import Any

import pytest

from benchmarks import compiled_step, gpu_tables

OURS: dict[str, Any] = {
    "kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}, "context_length": 16, "mode": "forward",
    "warmup_steps": 1, "measure_steps": 2, "attention": "eager",
}  # fmt: skip
OTHER = {**OURS, "attention": "sdpa_math", "context_length": 256}


def test_every_backend_has_a_step_to_compare() -> None:
    attentions = {spec["attention"] for spec in gpu_tables.compiled_step()}
    assert {compiled_step.OURS, *compiled_step.BACKENDS} <= attentions


def test_each_round_has_the_time_of_either_process() -> None:
    device, rounds = compiled_step.by_turns(OURS, OTHER, rounds=6, steps=2)
    assert device == "cpu"
    assert len(rounds) == 6
    assert statistics.median(ours / other for ours, other in rounds) < 1, "a sixteenth of the positions"


def test_a_failing_process_ends_the_comparison(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a process ended"):
        compiled_step.by_turns({**OURS, "attention": "nobodys"}, OTHER, rounds=1, steps=1)
    assert "unknown attention implementation" in capfd.readouterr().err


def test_neither_the_hosts_drift_nor_the_order_is_in_the_ratio() -> None:
    rounds = []
    for index, drift in enumerate([50.0, 60.0, 70.0, 80.0, 90.0, 100.0] * 4):
        late = 1.3 if index % 2 else 1 / 1.3  # the first process is slower where it is the one that has waited
        rounds.append((0.9 * drift * late, drift / late))
    assert compiled_step.ratio(rounds) == pytest.approx(0.9)
    single = statistics.median(ours / other for ours, other in rounds)
    assert single == pytest.approx(0.9 * (1.69 + 1 / 1.69) / 2), "the median over single rounds is no use"


def test_the_interval_is_that_of_processes() -> None:
    pairs = [[(float(step), 10.0)] * 4 for step in range(1, 21)]
    # Of 20, the ranks 6 and 15: David & Nagaraja (2003), Order Statistics, section 7.1.
    assert compiled_step.row("other", pairs)[:4] == ["other", "10.5", "10.0", "1.050 (0.600 to 1.500)"]
    assert compiled_step.row("other", pairs[:5])[3:] == ["0.300", "0.100 0.200 0.300 0.400 0.500"]


def test_jobs_of_each_round_are_compared() -> None:
    *_, told = compiled_step.by_jobs({compiled_step.OURS: OURS, "other": OTHER}, rounds=2)
    print(told)
    (step,) = [re.split(r" *\| *", line) for line in told.splitlines() if "| step_ms " in line]
    assert float(step[7]) < 1, "the ratio: a sixteenth of the positions"
    assert "2 processes each" in told


@pytest.mark.parametrize("text", ["13", "0", "-2"])
def test_an_odd_number_of_rounds_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an even number of rounds"):
        compiled_step.even(text)
    assert compiled_step.even("12") == 12
