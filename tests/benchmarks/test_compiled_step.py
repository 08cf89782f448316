"""Processes that take turns, with a small model on a CPU, and the ratio of their times."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks import compiled_step

OURS: dict[str, Any] = {
    "kind": "benchmark", "device": "cpu", "model": {"size": "tiny"}, "context_length": 16, "mode": "forward",
    "warmup_steps": 1, "measure_steps": 2, "attention": "eager",
}  # fmt: skip
OTHER = {**OURS, "attention": "sdpa_math", "context_length": 256}


@pytest.mark.long
def test_each_round_has_the_time_of_either_process() -> None:
    rounds = compiled_step.by_turns(OURS, OTHER, rounds=6, steps=2)
    assert len(rounds) == 6
    assert statistics.median(ours / other for ours, other in rounds) < 1, "a sixteenth of the positions"


@pytest.mark.long
def test_a_failing_process_ends_the_comparison() -> None:
    with pytest.raises(RuntimeError, match=r"a process failed: .*unknown attention implementation"):
        compiled_step.by_turns({**OURS, "attention": "nobodys"}, OTHER, rounds=1, steps=1)


def test_drift_and_order_do_not_change_the_ratio() -> None:
    rounds = []
    for index, drift in enumerate([50.0, 60.0, 70.0, 80.0, 90.0, 100.0] * 4):
        late = 1.3 if index % 2 else 1 / 1.3  # the process that has waited is slower
        rounds.append((0.9 * drift * late, drift / late))
    assert compiled_step.ratio(rounds) == pytest.approx(0.9)


def test_the_interval_is_that_of_processes() -> None:
    pairs = [[(float(step), 10.0)] * 4 for step in range(1, 21)]
    # Of 20, the ranks 6 and 15: David & Nagaraja (2003), Order Statistics, section 7.1.
    assert compiled_step.row("other", pairs) == ["other", "10.5", "10.0", "1.050 (0.600 to 1.500)"]
    assert compiled_step.row("other", pairs[:5])[3] == "0.300"
