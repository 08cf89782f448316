"""Timing steps, and the phases that they consist of.

A step starts on an idle device: nothing of a former step, nor the making of its batch, runs inside it. On a GPU phases
are timed by events, the step by the host's clock around a synchronisation, beside the time in which the host issued it.

The clock is one of several observers of steps and phases: a profiler or a memory recorder listens where it does. Among
them the clock is innermost, so that no time of the others' is in it.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.measure.memory import OutOfMemory, gist, is_out_of_memory
from workers.measure.warmup import WINDOW_S, WarmUp

REPORT_INTERVAL_S = 0.5


class Observer(Protocol):
    """Listens to steps. Phases of a step follow each other; work between them belongs to none."""

    def step_begins(self) -> None:
        """The step is prepared: its first phase follows."""

    def phase_begins(self, name: str) -> None:
        """The host is about to issue this phase's work."""

    def phase_ends(self, name: str) -> None:
        """The host has issued it; a GPU may still be working on it."""

    def step_ends(self) -> None:
        """The host has issued the step."""


@dataclass
class StepTime:
    """Times of one step."""

    wall_ms: float
    host_us: float | None
    """In which the host issued it; None on a CPU, where the host does the work itself."""
    phases_ms: dict[str, float]


class Clock(Observer, Protocol):
    """An observer that takes times."""

    @property
    def last(self) -> StepTime:
        """Of the step that ended last; the device has finished it."""
        ...


class HostClock:
    """For the CPU, where a call returns when its work is done."""

    last: StepTime

    def step_begins(self) -> None:
        self._phases: dict[str, float] = {}
        self._step = time.perf_counter()

    def phase_begins(self, name: str) -> None:
        self._phase = time.perf_counter()

    def phase_ends(self, name: str) -> None:
        self._phases[name] = 1e3 * (time.perf_counter() - self._phase)

    def step_ends(self) -> None:
        self.last = StepTime(1e3 * (time.perf_counter() - self._step), None, self._phases)


class CudaClock:
    """For a GPU, on the current stream. Events are made once for each phase and recorded again each step."""

    last: StepTime

    def __init__(self) -> None:
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def step_begins(self) -> None:
        self._names: list[str] = []
        torch.cuda.synchronize()
        self._step = time.perf_counter()

    def phase_begins(self, name: str) -> None:
        if name not in self._events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events[name] = start, end
        self._events[name][0].record()

    def phase_ends(self, name: str) -> None:
        self._events[name][1].record()
        self._names.append(name)

    def step_ends(self) -> None:
        host_us = 1e6 * (time.perf_counter() - self._step)
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - self._step)
        events = {name: self._events[name] for name in self._names}
        phases_ms = {name: start.elapsed_time(end) for name, (start, end) in events.items()}
        self.last = StepTime(wall_ms, host_us, phases_ms)


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def run_step(phases: Mapping[str, Callable[[], None]], observers: Sequence[Observer]) -> None:
    """Run a prepared step's phases in order. Observers are told of a beginning in order, of an end in reverse."""
    for observer in observers:
        observer.step_begins()
    for name, work in phases.items():
        for observer in observers:
            observer.phase_begins(name)
        work()
        for observer in reversed(observers):
            observer.phase_ends(name)
    for observer in reversed(observers):
        observer.step_ends()


@dataclass
class StepTimes:
    """Times in ms. The first step of all is kept apart; it is also the first sample if there was no warm-up."""

    first_step: float = 0.0
    step: array[float] = field(default_factory=lambda: array("d"))
    phases: dict[str, array[float]] = field(default_factory=dict)
    host_us: array[float] = field(default_factory=lambda: array("d"))
    """Microseconds in which the host issued each step; none on a CPU."""
    warmup: int = 0
    """Steps made before measuring began."""
    steady: bool | None = None
    """Whether times were steady then; None where that was not judged: a number of steps was asked for, or they are too
    slow."""
    too_slow: bool = False
    """Whether steps are too slow for a judgement of `steady`."""

    def keep(self, step: StepTime, inner: Mapping[str, float]) -> None:
        """Add one measured step, with the times of phases inside its phases."""
        self.step.append(step.wall_ms)
        if step.host_us is not None:
            self.host_us.append(step.host_us)
        for name, time_ms in {**step.phases_ms, **inner}.items():
            self.phases.setdefault(name, array("d")).append(time_ms)


def time_steps(
    phases: Mapping[str, Callable[[], None]],
    clock: Clock,
    *,
    observers: Sequence[Observer] = (),
    prepare: Callable[[], None] = lambda: None,
    inner_times_ms: Callable[[], Mapping[str, float]] = dict,
    warmup_steps: int | None,
    window_s: float = WINDOW_S,
    measure_steps: int,
    measuring: Callable[[], None] = lambda: None,
    stepped: Callable[[int, int], None] = lambda warmed_up, measured: None,
) -> StepTimes:
    """Run warm-up steps, then measured ones, each `prepare` (untimed) and then the phases in order.

    Memory does not grow with steps but for 8 bytes per sample.

    Args:
        phases: Name -> work, in the order they run.
        clock: Times them.
        observers: Who else listens, to warm-up and measured steps alike.
        prepare: Runs before each step, outside its time.
        inner_times_ms: Tells, after each step, times of phases inside its phases: those of a CUDA graph.
        warmup_steps: Steps that leave no samples, exactly so many; None: until the step's time is steady.
        window_s: Steady is what two windows of at least this length agree on.
        measure_steps: Steps that do, 1 or more.
        measuring: Called once, before the first measured step.
        stepped: Called between steps with (warm-up steps done, measured steps done), at most every half second, and
            after the last.

    Raises:
        OutOfMemory: the memory did not suffice; says in which phase of which step.
    """
    times, where = StepTimes(), Where()
    warming = WarmUp(warmup_steps, window_s=window_s)
    told = Told(stepped)
    everybody: list[Observer] = [where, *observers, clock]

    def step() -> StepTime:
        where.prepares()
        prepare()
        run_step(phases, everybody)
        times.first_step = times.first_step or clock.last.wall_ms
        return clock.last

    with memory_needed_in(where):
        while not warming.over:
            warming.add(step().wall_ms)
            told.tell(warming.calls, 0)
        times.warmup, times.steady, times.too_slow = warming.calls, warming.steady, warming.too_slow
        # What lives now will live on: the collector need not look at it again in the middle of a step.
        gc.collect()
        gc.freeze()
        measuring()
        for index in range(measure_steps):
            times.keep(step(), inner_times_ms())
            told.tell(warming.calls, index + 1, last=index + 1 == measure_steps)
    return times


class Told:
    """Passes progress on, at most every half second."""

    def __init__(self, stepped: Callable[[int, int], None]) -> None:
        self._stepped = stepped
        self._at = time.perf_counter()

    def tell(self, warmed_up: int, measured: int, *, last: bool = False) -> None:
        """So many steps are done; the last call is passed on in any case."""
        now = time.perf_counter()
        if last or now - self._at >= REPORT_INTERVAL_S:
            self._at = now
            self._stepped(warmed_up, measured)


class Where:
    """An observer that remembers where a step is, for errors."""

    phase = "preparation"
    step = 1
    """Counted from 1."""

    def prepares(self) -> None:
        """The next step's preparation begins."""
        self.phase = "preparation"

    def step_begins(self) -> None:
        """Its number is told already."""

    def phase_begins(self, name: str) -> None:
        self.phase = name

    def phase_ends(self, name: str) -> None:
        """The phase is still the one that errors name: a device may work on it."""

    def step_ends(self) -> None:
        self.step += 1


@contextmanager
def memory_needed_in(where: Where) -> Iterator[None]:
    """Turns a lack of memory inside into OutOfMemory that names phase and step; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"out of memory in {where.phase} of step {where.step}: {gist(error)}") from error
        raise
