"""What scripts say of their steps, when they run by themselves: nothing is measured, and nothing is imported for it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import flopwatch
from flopwatch import steps


def test_a_script_by_itself_pays_for_no_import() -> None:
    code = (
        "import sys, flopwatch\n"
        "with flopwatch.phase('forward'):\n    flopwatch.work(flops=1)\n"
        "assert not {'torch', 'app', 'httpx', 'pydantic'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_phases_do_nothing_by_themselves() -> None:
    assert flopwatch.phase("forward") is flopwatch.phase("any name, since nobody listens")
    with flopwatch.phase("forward"), flopwatch.phase("inside"):
        flopwatch.work(tokens=1)


def test_measure_prints_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    flopwatch.measure(lambda: calls.append(1), measure_steps=5)
    assert len(calls) == 3 + 5
    assert capsys.readouterr().out.endswith("ms, the median of 5\n")


def test_a_listener_hears_all(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    class Listener:
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            heard.append(name)
            yield

        def work(self, **amounts: float | None) -> None:
            heard.append(amounts)

        def measure(self, step: Any, **options: Any) -> None:
            heard.append(options)

    monkeypatch.setattr(steps, "_listener", None)
    steps.listen(Listener())
    with flopwatch.phase("forward"):
        flopwatch.work(items=3)
    flopwatch.measure(lambda: None, measure_steps=2)
    assert heard == [
        "forward",
        {"flops": None, "tokens": None, "items": 3},
        {"warmup_steps": None, "measure_steps": 2},
    ]


@pytest.mark.parametrize(
    ("step_ms", "number"),
    [(9.0, 150), (10.0, 100), (1e-3, 1000), (0.0, 1000), (333.0, 10), (60.0, 20), (5e3, 10), (math.inf, 10)],
)
def test_a_second_of_steps_is_a_round_number(step_ms: float, number: int) -> None:
    assert steps.steps_of_a_second(step_ms) == number
