"""Timing steps, and the phases that they consist of.

GPU phases are timed by CUDA events, the whole step by the host's clock around a synchronisation. A step starts on an
idle device: nothing of a former step, nor the making of its batch, runs inside it.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from workers.measure.memory import OutOfMemory, gist, is_out_of_memory

REPORT_INTERVAL_S = 0.5


class Clock(Protocol):
    """Times one step at a time."""

    def start(self) -> None:
        """Wait for the device, then start the step."""

    def mark(self) -> None:
        """One phase has been issued."""

    def stop(self) -> tuple[float, list[float]]:
        """Wait for the device; the step's wall time and its phases' times, in ms."""
        ...


class HostClock:
    """For the CPU, where a call returns when its work is done."""

    def start(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def stop(self) -> tuple[float, list[float]]:
        wall = time.perf_counter() - self._marks[0]
        phases = pairwise(self._marks)
        return 1e3 * wall, [1e3 * (end - start) for start, end in phases]


class CudaClock:
    """For a GPU. The events are made once and recorded again each step."""

    def __init__(self, phases: int) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(phases + 1)]  # type: ignore[no-untyped-call]

    def start(self) -> None:
        torch.cuda.synchronize()
        self._start = time.perf_counter()
        self._next = 0
        self.mark()

    def mark(self) -> None:
        self._events[self._next].record()
        self._next += 1

    def stop(self) -> tuple[float, list[float]]:
        torch.cuda.synchronize()
        wall = time.perf_counter() - self._start
        events = self._events[: self._next]
        return 1e3 * wall, [start.elapsed_time(end) for start, end in pairwise(events)]


def make_clock(device: torch.device, phases: int) -> Clock:
    """The clock of a device for steps of at most `phases` phases."""
    return CudaClock(phases) if device.type == "cuda" else HostClock()


@dataclass
class StepTimes:
    """Times in ms. The first step of all is kept apart; it is also the first sample if there was no warm-up."""

    first_step: float = 0.0
    step: array[float] = field(default_factory=lambda: array("d"))
    phases: dict[str, array[float]] = field(default_factory=dict)


def time_steps(
    phases: Mapping[str, Callable[[], None]],
    clock: Clock,
    *,
    prepare: Callable[[], None] = lambda: None,
    warmup_steps: int,
    measure_steps: int,
    measuring: Callable[[], None] = lambda: None,
    stepped: Callable[[int, int], None] = lambda done, total: None,
) -> StepTimes:
    """Run warm-up steps, then measured ones, each `prepare` (untimed) and then the phases in order.

    Memory does not grow with steps but for 8 bytes per sample.

    Args:
        phases: Name -> work, in the order they run.
        clock: Times them.
        prepare: Runs before each step, outside its time.
        warmup_steps: Steps that leave no samples, 0 or more.
        measure_steps: Steps that do, 1 or more.
        measuring: Called once, before the first measured step.
        stepped: Called between steps with (steps done, steps in all, warm-up included), at most every half second, and
            after the last.

    Raises:
        OutOfMemory: the memory did not suffice; says in which phase of which step.
    """
    times = StepTimes(phases={name: array("d") for name in phases})
    total = warmup_steps + measure_steps
    reported = time.perf_counter()
    where = "preparation"
    index = 0
    try:
        for index in range(total):
            if index == warmup_steps:
                # What lives now will live on: the collector need not look at it again in the middle of a step.
                gc.collect()
                gc.freeze()
                measuring()
            where = "preparation"
            prepare()
            clock.start()
            for where, work in phases.items():  # noqa: B007
                work()
                clock.mark()
            wall, laps = clock.stop()
            if index == 0:
                times.first_step = wall
            if index >= warmup_steps:
                _keep(times, wall, laps)
            now = time.perf_counter()
            if now - reported >= REPORT_INTERVAL_S or index + 1 == total:
                reported = now
                stepped(index + 1, total)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"out of memory in {where} of step {index + 1} of {total}: {gist(error)}") from error
        raise
    return times


def _keep(times: StepTimes, wall: float, laps: Sequence[float]) -> None:
    times.step.append(wall)
    for samples, lap in zip(times.phases.values(), laps, strict=True):
        samples.append(lap)
