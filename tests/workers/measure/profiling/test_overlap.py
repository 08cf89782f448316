"""When a rank computes and when it communicates."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.ranges import named, record_ranges
from workers.measure.profiling.overlap import StepOverlap, gloo_spans, overlap_of, record_overlap
from workers.measure.spans import at_most, total_ms, without


@pytest.mark.parametrize(
    ("spans", "others", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 3), (5, 6)], [(0, 2), (3, 5), (6, 10)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(2, 4), (6, 8)], [(0, 1), (1, 20)], []),
        ([(0, 2), (4, 6)], [(2, 4), (6, 9)], [(0, 2), (4, 6)]),
    ],
)
def test_what_is_left_without_others(spans: Any, others: Any, left: Any) -> None:
    assert without(spans, others) == left


def test_a_step_has_what_happened_in_it_from_its_beginning() -> None:
    spans = [((90, 120), False), ((130, 150), True), ((140, 160), False), ((190, 230), True), ((300, 310), True)]
    overlap = overlap_of(spans, (100, 200))
    assert overlap == StepOverlap(100, [(0, 20), (40, 60)], [(30, 50), (90, 100)])
    assert overlap.exposed == [(30, 40), (90, 100)]
    assert set(overlap.streams()) == {"compute", "communication", "exposed"}
    assert total_ms([(0, 10**6), (2 * 10**6, 3 * 10**6)]) == pytest.approx(2.0)


def test_a_timeline_joins_near_spans() -> None:
    spans = [(0, 1), (2, 3), (10, 11), (30, 31)]
    assert at_most(spans, 4) == spans
    assert at_most(spans, 3) == [(0, 3), (10, 11), (30, 31)]
    assert at_most(spans, 1) == [(0, 31)]


def test_operations_of_gloo_are_those_that_its_threads_end() -> None:
    def event(name: str, *, is_async: bool) -> Any:
        values = {"name": name, "is_async": is_async, "start_ns": 5, "duration_ns": 2}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    events = [event("gloo:all_reduce", is_async=True), event("gloo:all_reduce", is_async=False)]
    assert list(gloo_spans([*events, event("aten::mm", is_async=True)])) == [("gloo:all_reduce", (5, 7))]


def test_what_a_hook_waits_for_is_no_computation() -> None:
    waited_ms = 50.0
    weight = torch.ones(64, 64, requires_grad=True)
    weight.register_hook(lambda _gradient: time.sleep(1e-3 * waited_ms))

    def work() -> None:
        with record_ranges(), named("step_1"):
            (torch.ones(64, 64) @ weight).sum().backward()

    (step,) = record_overlap(work, ["step_1"], on_gpu=False).steps
    assert 0 < total_ms(step.compute) <= 1e-6 * step.length_ns - waited_ms
