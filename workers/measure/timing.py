"""Times steps and their phases.

A step starts on an idle device, so its time includes neither work of the previous step nor the making of its batch. On
a GPU events time the phases; the host's clock measures the step up to a synchronisation, and how long the host took to
issue it.

`time_loop` times steps that follow each other without a synchronisation, as a training loop runs them.

The clock is one of several observers of steps and phases; a profiler or a memory recorder are others. The clock is the
innermost observer, so its times do not include the others' work.
"""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from kernels.clock import now_s
from kernels.device_events import Event, synchronize
from workers.measure.memory import translate_oom
from workers.measure.warmup import WINDOW_S, WarmUp

REPORT_INTERVAL_S = 0.5
LOOP_STEPS = 100
"""Most samples of a loop between two synchronisations; a GPU's queue is shorter than that many steps."""


class Observer:
    """Listens to steps; one that inherits this does nothing where it has no method of its own. Phases of a step follow
    each other; work between two phases belongs to neither."""

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
    """Time in which the host issued the step; None on a CPU, where the host does the work itself."""
    phases_ms: dict[str, float]
    """By phase; of a phase that comes several times in a step, their sum."""


class HostClock(Observer):
    """The clock for a CPU, where a call returns when its work is done: an observer that takes times."""

    last: StepTime
    """The times of the step that ended last."""

    def step_begins(self) -> None:
        self._phases: dict[str, float] = {}
        self._step = now_s()

    def phase_begins(self, name: str) -> None:
        self._phase = now_s()

    def phase_ends(self, name: str) -> None:
        self._phases[name] = self._phases.get(name, 0.0) + 1e3 * (now_s() - self._phase)

    def step_ends(self) -> None:
        self.last = StepTime(1e3 * (now_s() - self._step), None, self._phases)


class CudaClock(Observer):
    """The clock for a GPU, on the current stream. It makes events once for each place in a step and reuses them in each
    step."""

    last: StepTime

    def __init__(self) -> None:
        self._events: list[tuple[Event, Event]] = []

    def step_begins(self) -> None:
        self._names: list[str] = []
        synchronize()
        self._step = now_s()

    def phase_begins(self, name: str) -> None:
        if len(self._names) == len(self._events):
            self._events.append((Event(), Event()))
        self._events[len(self._names)][0].record()

    def phase_ends(self, name: str) -> None:
        self._events[len(self._names)][1].record()
        self._names.append(name)

    def step_ends(self) -> None:
        host_us = 1e6 * (now_s() - self._step)
        synchronize()
        wall_ms = 1e3 * (now_s() - self._step)
        phases_ms: dict[str, float] = {}
        for name, (start, end) in zip(self._names, self._events, strict=False):
            phases_ms[name] = phases_ms.get(name, 0.0) + start.milliseconds_to(end)
        self.last = StepTime(wall_ms, host_us, phases_ms)


Clock = HostClock | CudaClock


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


Work = Mapping[str, Callable[[], None]] | Callable[[Sequence[Observer]], None]
"""A step's work: by phase, in the order they run; or a function that does all of it, and tells the observers where its
phases begin and end."""


def run_step(work: Work, observers: Sequence[Observer]) -> None:
    """Run a prepared step. Observers are called in order at each beginning, in reverse order at each end."""
    for observer in observers:
        observer.step_begins()
    if isinstance(work, Mapping):
        for name, phase in work.items():
            begin_phase(name, observers)
            phase()
            end_phase(name, observers)
    else:
        work(observers)
    for observer in reversed(observers):
        observer.step_ends()


def begin_phase(name: str, observers: Sequence[Observer]) -> None:
    for observer in observers:
        observer.phase_begins(name)


def end_phase(name: str, observers: Sequence[Observer]) -> None:
    """Tell the observers, in reverse order, that a phase has ended."""
    for observer in reversed(observers):
        observer.phase_ends(name)


@dataclass
class StepTimes:
    """Times in ms. The very first step has a field of its own; without a warm-up it is also the first sample."""

    first_step: float = 0.0
    step: array[float] = field(default_factory=lambda: array("d"))
    phases: dict[str, array[float]] = field(default_factory=dict)
    host_us: array[float] = field(default_factory=lambda: array("d"))
    """Host time to issue each step, in µs; empty on a CPU."""
    left: array[float] = field(default_factory=lambda: array("d"))
    """The part of each step that is in no phase; empty on a CPU."""
    warmup: int = 0
    """Number of steps before measuring began."""
    steady: bool | None = None
    """Whether times were steady then; None if this was not judged, because the caller fixed the number of steps or
    because they are too slow, and where noise hides it."""
    too_slow: bool = False
    """Whether steps are too slow to judge `steady`."""
    hidden: float | None = None
    """As `WarmUp.hidden`."""

    def keep(self, step: StepTime, inner: Mapping[str, float]) -> None:
        """Add one measured step, with the times of phases inside its phases."""
        self.step.append(step.wall_ms)
        if step.host_us is not None:
            self.host_us.append(step.host_us)
            self.left.append(step.wall_ms - sum(step.phases_ms.values()))
        for name, time_ms in {**step.phases_ms, **inner}.items():
            self.phases.setdefault(name, array("d")).append(time_ms)


def time_steps(
    phases: Work,
    clock: Clock,
    *,
    prepare: Callable[[], None] = lambda: None,
    inner_times_ms: Callable[[], Mapping[str, float]] = dict,
    warmup_steps: int | None,
    window_s: float = WINDOW_S,
    measure_steps: int | Callable[[float], int],
    measuring: Callable[[int], None] = lambda steps: None,
    on_progress: Callable[[int, int], None] = lambda warmed_up, measured: None,
) -> StepTimes:
    """Run warm-up steps, then measured ones, each `prepare` (untimed) and then the phases in order.

    Memory grows by 8 bytes per sample. Raises OutOfMemory: the memory did not suffice; the message says in which phase
    of which step.

    Args:
        prepare: Runs before each step, outside its time.
        inner_times_ms: Returns, after each step, times of phases inside its phases: those of a CUDA graph.
        warmup_steps: Exact number of steps without samples; None: as many as it takes until the step's time is steady.
        window_s: Least length of a window; see `WarmUp`.
        measure_steps: Number of steps with samples, 1 or more; or of it a function of the quickest warm-up step's ms.
        measuring: Called once, before the first measured step, with their number.
        on_progress: Called between steps with (warm-up steps done, measured steps done), at most every half second,
            and after the last.
    """
    times, where = StepTimes(), StepPosition()
    warming = WarmUp(warmup_steps, window_s=window_s)
    progress = ProgressReports(on_progress)

    def step() -> StepTime:
        where.preparation_begins()
        prepare()
        run_step(phases, (where, clock))
        times.first_step = times.first_step or clock.last.wall_ms
        return clock.last

    with translate_oom(where):
        quickest_ms = math.inf
        while not warming.over:
            quickest_ms = min(quickest_ms, wall_ms := step().wall_ms)
            warming.add(wall_ms)
            progress.report(warming.calls, 0)
        times.warmup, times.steady = warming.calls, warming.steady
        times.too_slow, times.hidden = warming.too_slow, warming.hidden
        # The collector would scan during a step what lives to the end.
        gc.collect()
        gc.freeze()
        number = measure_steps if isinstance(measure_steps, int) else measure_steps(quickest_ms)
        measuring(number)
        for index in range(number):
            times.keep(step(), inner_times_ms())
            progress.report(warming.calls, index + 1, last=index + 1 == number)
    return times


class HostMarks:
    """Marks between the steps of a loop on a CPU, by the host's clock."""

    left_ms = 0.0

    def __init__(self) -> None:
        self._at: list[float] = []

    def mark(self) -> None:
        self._at.append(now_s())

    def take_ms(self) -> list[float]:
        times = [1e3 * (end - begin) for begin, end in pairwise(self._at)]
        self._at.clear()
        return times


class CudaMarks:
    """Marks on a GPU's current stream, by events that are used again in the next loop."""

    def __init__(self) -> None:
        self.left_ms = 0.0
        """Longest time for which the device worked on after it had reached the last mark: on streams for which the
        current one does not wait."""
        self._events: list[Event] = []
        self._used = 0

    def mark(self) -> None:
        """Mark the present place in the device's work. Does not wait for it."""
        if self._used == len(self._events):
            self._events.append(Event())
        self._events[self._used].record()
        self._used += 1

    def take_ms(self) -> list[float]:
        """Wait for the device; return the times between the marks in ms, and forget the marks."""
        self._events[self._used - 1].synchronize()
        reached = now_s()
        synchronize()
        self.left_ms = max(self.left_ms, 1e3 * (now_s() - reached))
        times = [begin.milliseconds_to(end) for begin, end in pairwise(self._events[: self._used])]
        self._used = 0
        return times


Marks = HostMarks | CudaMarks


def make_marks(device: torch.device) -> Marks:
    return CudaMarks() if device.type == "cuda" else HostMarks()


def time_loop(
    phases: Work,
    marks: Marks,
    *,
    prepare: Callable[[], None] = lambda: None,
    measure_steps: int,
    loop_steps: int = LOOP_STEPS,
    on_progress: Callable[[int], None] = lambda measured: None,
) -> array[float]:
    """Time steps that follow each other. The host waits for the device only every `loop_steps` steps.

    The first step after each such wait has no sample, since the device waits there until the host has issued its work.
    The program must be warm. Raises OutOfMemory: the memory did not suffice; the message says in which phase of which
    step.

    Args:
        prepare: Runs before each step, within its time, as in a training loop.
        measure_steps: Number of samples, 1 or more.
        loop_steps: Most samples between two synchronisations.
        on_progress: Called after each of them with the number of samples so far.

    Returns:
        Milliseconds from the end of each step's predecessor to its own end.
    """
    times, where = array("d"), StepPosition()
    with translate_oom(where):
        while len(times) < measure_steps:
            for _ in range(1 + min(loop_steps, measure_steps - len(times))):
                where.preparation_begins()
                prepare()
                run_step(phases, [where])
                marks.mark()
            times.extend(marks.take_ms())
            on_progress(len(times))
    return times


class ProgressReports:
    """Reports progress, at most every half second."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress
        self._at = now_s()

    def report(self, warmed_up: int, measured: int, *, last: bool = False) -> None:
        """Report the numbers of warm-up and measured steps done; the last report is never left out."""
        now = now_s()
        if last or now - self._at >= REPORT_INTERVAL_S:
            self._at = now
            self._on_progress(warmed_up, measured)


class StepPosition(Observer):
    """An observer that keeps the present step and phase, for error messages."""

    phase = "preparation"
    step = 1
    """Number of the step, counted from 1."""

    def __str__(self) -> str:
        return f"{'' if self.phase == 'step' else f'{self.phase} of '}step {self.step}"

    def preparation_begins(self) -> None:
        self.phase = "preparation"

    def phase_begins(self, name: str) -> None:
        self.phase = name  # it stays the one that errors name when it ends: a device may still work on it

    def step_ends(self) -> None:
        self.step += 1
