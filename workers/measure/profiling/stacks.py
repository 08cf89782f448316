"""Folds a recording with Python's functions into stacks, each with the time that was spent in it.

On a GPU the time is that of the kernels, copies and fills that the stack launched; on a CPU, the time that the host
spent at the top of the stack. A stack begins with its phase. Frames around the phase (the worker's own) are left out.
Work of the backward pass that runs on a thread of autograd has no Python frames.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from workers.measure.profiling.attribution import parents
from workers.measure.profiling.recording import HostEvent, Recording

Stacks = Mapping[tuple[str, ...], int]
"""Time in ns by stack, the outermost frame first."""
HIDDEN = re.compile(r"kernels/ranges\.py|contextlib\.py|torch/autograd/profiler\.py|torch/_ops\.py|workers/measure/")
"""Python's functions that only name ranges or drive the step."""
MAX_DEPTH = 200


def fold(recording: Recording, phases: Collection[str], *, on_gpu: bool) -> Stacks:
    """Return the time of each stack of the recording's phases."""
    events = [event for event in recording.host if event.kind != "launch"]
    above = parents(events)
    times = _device_times(recording, events) if on_gpu else _self_times(events, above)
    intervals = [event for event in events if event.kind == "range" and event.name in phases]
    found = Counter[tuple[str, ...]]()
    for (index, leaf), time in times.items():
        frames, phase = _frames(events, above, index, phases)
        if phase is None:
            phase = _phase_at(intervals, events[index].begin_ns)
        if phase is not None and time > 0:
            found[phase, *frames, *leaf] += time
    return found


def folded(stacks: Stacks) -> str:
    """Return the stacks as text: a line each, frames joined by semicolons, a blank, and the time in µs."""
    lines = []
    for frames, time in sorted(stacks.items()):
        if (rounded := round(1e-3 * time)) > 0:
            lines.append(";".join(_plain(frame) for frame in frames) + f" {rounded}\n")
    return "".join(lines)


def _device_times(recording: Recording, events: Sequence[HostEvent]) -> Counter[tuple[int, tuple[str, ...]]]:
    by_id = {event.id: index for index, event in enumerate(events) if event.id and event.kind != "python"}
    found = Counter[tuple[int, tuple[str, ...]]]()
    for work in recording.device:
        if work.operator in by_id:
            found[by_id[work.operator], (work.name,)] += work.end_ns - work.begin_ns
    return found


def _self_times(events: Sequence[HostEvent], above: Sequence[int | None]) -> Counter[tuple[int, tuple[str, ...]]]:
    times = [event.end_ns - event.begin_ns for event in events]
    for event, parent in zip(events, above, strict=True):
        if parent is not None:
            times[parent] -= event.end_ns - event.begin_ns
    return Counter({(index, ()): time for index, time in enumerate(times)})


def _frames(
    events: Sequence[HostEvent], above: Sequence[int | None], index: int, phases: Collection[str]
) -> tuple[list[str], str | None]:
    """Return the frames of an event inside its phase, the outermost first, and the phase, if one is around it."""
    frames: list[str] = []
    at: int | None = index
    while at is not None:
        event = events[at]
        if event.kind == "range" and event.name in phases:
            return frames[-MAX_DEPTH:][::-1], event.name
        if event.kind != "python" or HIDDEN.search(event.name) is None:
            frames.append(event.name)
        at = above[at]
    return frames[-MAX_DEPTH:][::-1], None


def _phase_at(intervals: Sequence[HostEvent], time_ns: int) -> str | None:
    return next((phase.name for phase in intervals if phase.begin_ns <= time_ns <= phase.end_ns), None)


def _plain(frame: str) -> str:
    return " ".join(frame.replace(";", ":").split())
