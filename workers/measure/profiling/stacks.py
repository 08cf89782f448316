"""Folds a recording with Python's functions, or samples, into stacks, each with the time that was spent in it.

On a GPU the time is that of the kernels, copies and fills that the stack launched; on a CPU, the time that the host
spent at the top of the stack. A stack begins with its phase. Frames around the phase (the worker's own) are left out.
Work of the backward pass that runs on a thread of autograd has no Python frames.

Other threads have a root of their own: they run beside the step, and a profiler cannot tell whether they work or wait.
On a CPU they come from samples, by the processor's time that they take.
"""

import heapq
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

from workers.measure.paths import without_folders
from workers.measure.profiling.attribution import own_steps, parents
from workers.measure.profiling.recording import HostEvent, Recording
from workers.measure.profiling.sampling import Frames, Samples

Stacks = Mapping[tuple[str, ...], int]
"""Time in ns by stack, the outermost frame first."""
HIDDEN = re.compile(
    r"\b(kernels/ranges|contextlib|torch/autograd/profiler|torch/_ops|workers/measure/(ranges|timing))\.py\("
)
"""Python's functions that only name ranges or drive the step."""
OTHERS = "other threads"
"""The root of what other threads than the step's and autograd's do."""
MAX_DEPTH = 200
MAX_STACKS = 20_000
"""Most stacks in a text, those with the most time. A deep model has a stack of its own for each call in each layer."""


def fold(recording: Recording, phases: Collection[str], *, on_gpu: bool) -> Stacks:
    """Return the time of each stack of the phases of the recording's steps, without the warm-up."""
    events = [event for event in recording.host if event.kind != "launch"]
    above = parents(events)
    times = _device_times(recording, events) if on_gpu else _self_times(events, above)
    steps = {index for index, number in own_steps(events, above).items() if number}
    in_steps = {
        index
        for index, event in enumerate(events)
        if event.kind == "range" and event.name in phases and _is_in_a_step(events, above, index, steps)
    }
    stacks = Counter[tuple[str, ...]]()
    for (index, leaf), time in times.items():
        frames, phase = _frames(events, above, index, in_steps)
        if phase is None:
            phase = _root_of_another_thread(events, above, index, in_steps, on_gpu=on_gpu)
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


def _is_in_a_step(events: Sequence[HostEvent], above: Sequence[int | None], index: int, steps: Collection[int]) -> bool:
    at = above[index]
    while at is not None and events[at].kind == "python":
        at = above[at]
    return at in steps


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


def _root_of_another_thread(
    events: Sequence[HostEvent], above: Sequence[int | None], index: int, phases: Set[int], *, on_gpu: bool
) -> str | None:
    """Return the root of what another thread did during a phase: that phase, if it is autograd's; None for the phases'
    own thread, and on a CPU for all but autograd's, since those threads may wait."""
    event = events[index]
    for phase in (events[its] for its in phases):
        if phase.begin_ns <= event.begin_ns <= phase.end_ns and phase.thread != event.thread:
            at: int | None = index
            while at is not None and events[at].kind != "backward":
                at = above[at]
            return phase.name if at is not None else OTHERS if on_gpu else None
    return None


def sampled(samples: Samples, step_ms: float) -> Stacks:
    """Return the time of each stack of the step's thread in a step of this length, and those of other threads."""
    scale = 1e6 * step_ms / (sum(sample.wall_ns for sample in samples.stacks.values()) or 1)
    stacks = Counter[tuple[str, ...]](other_threads(samples))
    for (phase, frames), sample in samples.stacks.items():
        stacks[phase, *_names(frames)] += round(scale * sample.wall_ns)
    return stacks


def other_threads(samples: Samples) -> Stacks:
    """Return the processor's time of each stack of other threads in a step, under a root of their own."""
    stacks = Counter[tuple[str, ...]]()
    for (thread, frames), taken in samples.others_ns.items():
        stacks[OTHERS, thread, *_names(frames)] += round(taken / max(samples.steps, 1))
    return stacks


def _names(frames: Frames) -> list[str]:
    names = (without_folders(f"{file}({line}): {function}") for file, function, line in frames)
    return [name for name in names if HIDDEN.search(name) is None]


def title_of(stacks: Stacks, how: str, *, on_gpu: bool) -> str:
    """Return what a flame graph shows, with its times, which its frames add up to. `how` says how they were taken."""
    what = "time of the GPU by the stack that launched its work" if on_gpu else "time of the host"
    beside = sum(time for frames, time in stacks.items() if frames[0] == OTHERS)
    title = f"{what}, {how}: {1e-6 * (sum(stacks.values()) - beside):.4g} ms of one step"
    return f"{title}; beside it, {OTHERS} took {1e-6 * beside:.4g} ms" if beside else title


def _plain(frame: str) -> str:
    return " ".join(frame.replace(";", ":").split())
