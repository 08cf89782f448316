"""The comparison on the CPU takes its times by the jobs' own stopwatch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import attention_cpu
from workers.measure.stopwatch import HostStopwatch


class Clock:
    """Moves only while work is done, by as long as it is said to take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> attention_cpu.Call:
        def work() -> object:
            self.turns.append(name)
            self.now += seconds if self.turns.count(name) > 1 else 3.0
            return name

        return work


def test_calls_have_turns_and_quick_ones_more_of_them() -> None:
    """The first call of each, which builds a library for 3 s, is in no sample and decides nothing."""
    clock = Clock()
    calls = {"quick": clock.call("quick", 0.020), "slow": clock.call("slow", 0.400)}
    samples = attention_cpu.measure(calls, 2, HostStopwatch(clock))
    assert samples == {"quick": pytest.approx([20.0] * 2), "slow": pytest.approx([400.0] * 2)}
    assert clock.turns[4:] == [*["quick"] * 5, "slow"] * 2
