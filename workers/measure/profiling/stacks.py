"""Folds a recording with Python's functions into stacks, each with the time that was spent in it.

On a GPU the time is that of the kernels, copies and fills that the stack launched; on a CPU, the time that the host
spent at the top of the stack. A stack begins with its phase. Frames around the phase (the worker's own) are left out.
Work of the backward pass that runs on a thread of autograd has no Python frames.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

from workers.measure.profiling.attribution import STEP, parents
from workers.measure.profiling.recording import HostEvent, Recording

Stacks = Mapping[tuple[str, ...], int]
"""Time in ns by stack, the outermost frame first."""
HIDDEN = re.compile(
    r"\b(kernels/ranges|contextlib|torch/autograd/profiler|torch/_ops|workers/measure/(ranges|timing))\.py\("
)
"""Python's functions that only name ranges or drive the step."""
MAX_DEPTH = 200
MAX_STACKS = 20_000
"""Most stacks in a text, those with the most time. A deep model has a stack of its own for each call in each layer."""


def fold(recording: Recording, phases: Collection[str], *, on_gpu: bool) -> Stacks:
    """Return the time of each stack of the phases of the recording's steps, without the warm-up."""
    events = [event for event in recording.host if event.kind != "launch"]
    above = parents(events)
    times = _device_times(recording, events) if on_gpu else _self_times(events, above)
    in_steps = {
        index
        for index, event in enumerate(events)
        if event.kind == "range" and event.name in phases and _is_in_a_step(events, above, index)
    }
    stacks = Counter[tuple[str, ...]]()
    for (index, leaf), time in times.items():
        frames, phase = _frames(events, above, index, in_steps)
        if phase is None:
            phase = _phase_of_another_thread(events, in_steps, events[index])
        if phase is not None and time > 0:
            stacks[phase, *frames, *leaf] += time
    return stacks


def folded(stacks: Stacks) -> str:
    """Return the top stacks as text: a line each, frames joined by semicolons, a blank, and the time in µs."""
    lines = []
    for frames, time in sorted(heapq.nlargest(MAX_STACKS, stacks.items(), key=lambda stack: stack[1])):
        if (rounded := round(1e-3 * time)) > 0:
            lines.append(";".join(_plain(frame) for frame in frames) + f" {rounded}\n")
    return "".join(lines)


def _device_times(recording: Recording, events: Sequence[HostEvent]) -> Counter[tuple[int, tuple[str, ...]]]:
    by_id = {event.id: index for index, event in enumerate(events) if event.id and event.kind != "python"}
    times = Counter[tuple[int, tuple[str, ...]]]()
    for work in recording.device:
        if work.operator in by_id:
            times[by_id[work.operator], (work.name,)] += work.end_ns - work.begin_ns
    return times


def _self_times(events: Sequence[HostEvent], above: Sequence[int | None]) -> Counter[tuple[int, tuple[str, ...]]]:
    times = [event.end_ns - event.begin_ns for event in events]
    for event, parent in zip(events, above, strict=True):
        if parent is not None:
            times[parent] -= event.end_ns - event.begin_ns
    return Counter({(index, ()): time for index, time in enumerate(times)})


def _is_in_a_step(events: Sequence[HostEvent], above: Sequence[int | None], index: int) -> bool:
    at = above[index]
    while at is not None and events[at].kind == "python":
        at = above[at]
    return at is not None and STEP.fullmatch(events[at].name) is not None


def _frames(
    events: Sequence[HostEvent], above: Sequence[int | None], index: int, phases: Set[int]
) -> tuple[list[str], str | None]:
    """Return the frames of an event inside its phase, the outermost first, and the phase, or None without one."""
    frames: list[str] = []
    phase: str | None = None
    at: int | None = index
    while at is not None and phase is None:
        event = events[at]
        if at in phases:
            phase = event.name
        elif event.kind != "python" or HIDDEN.search(event.name) is None:
            frames.append(event.name)
        at = above[at]
    return frames[::-1][:MAX_DEPTH], phase


def _phase_of_another_thread(events: Sequence[HostEvent], phases: Set[int], event: HostEvent) -> str | None:
    """Return the phase during which another thread ran an event; None for events of the phases' own thread."""
    for phase in (events[index] for index in phases):
        if phase.begin_ns <= event.begin_ns <= phase.end_ns:
            return None if phase.thread == event.thread else phase.name
    return None


def _plain(frame: str) -> str:
    return " ".join(frame.replace(";", ":").split())
