"""Records when a rank computes and when it communicates, from torch's profiler.

On a GPU, CUPTI reports when each kernel ran: NCCL's are communication, all others are computation. On a CPU, gloo
reports when each of its operations ran, on threads of its own, and operators are computation. This works for our own
wrappers and for torch's alike. A collective kernel that waits for other ranks counts as communication.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from workers.measure.profiling.attribution import Attribution, Interval, RecordedWork
from workers.measure.profiling.classes import COMMUNICATION, class_of_kernel
from workers.measure.profiling.idle import RUNNING, Stretch, loading, stretches
from workers.measure.profiling.recording import NODE, Recording, device_events, host_events
from workers.measure.spans import Span, merged, without

GLOO = "gloo:"
"""Head of the names of gloo's operations."""
OPERATORS = ("operator", "backward")


@dataclass(frozen=True)
class StepOverlap:
    """A rank's computation and communication in one step, as ordered spans that do not overlap; the step begins at
    0."""

    length_ns: int
    compute: list[Span]
    communication: list[Span]

    @property
    def exposed(self) -> list[Span]:
        """Spans in which the rank communicated and computed nothing."""
        return without(self.communication, self.compute)

    def streams(self) -> dict[str, list[Span]]:
        """Return the spans by the names that timelines show."""
        return {"compute": self.compute, "communication": self.communication, "exposed": self.exposed}


@dataclass(frozen=True)
class OverlapRecording:
    """The steps that the profiler saw, their work, and the function that writes its Chrome trace, uncompressed JSON."""

    steps: list[StepOverlap]
    work: list[RecordedWork]
    stretches: list[tuple[Interval, list[Stretch]]]
    """Each step, and its parts of one class."""
    collectives: list[tuple[str, Span]]
    """All collectives, in the order in which they began."""
    save: Callable[[Path], None]


def record_overlap(
    work: Callable[[], None], steps: Sequence[str], phases: Sequence[str] = (), *, on_gpu: bool
) -> OverlapRecording:
    """Run the work under torch's profiler. Raises RuntimeError: the profiler failed, or did not see every step. `work`:
    runs the steps, each in a range of its name that ends when the device has finished it. `steps`: names of the ranges:
    "step_1", …. `phases`: names of the steps' phases, whose work is returned."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's warnings are about its use over several cycles
        with torch.profiler.profile(activities=activities) as profiler:
            work()
    inner: Any = profiler.profiler
    results = inner.kineto_results
    events = results.events()
    host = sorted(host_events(events), key=lambda event: (event.begin_ns, -event.end_ns))
    device = sorted(device_events(events), key=lambda event: event.begin_ns)
    attribution = Attribution(Recording(host, device), phases, on_gpu=on_gpu)
    ranges = {step.name: (step.begin_ns, step.end_ns) for step in attribution.steps}
    if missing := [name for name in steps if name not in ranges]:
        raise RuntimeError(f"the profiler did not see {', '.join(missing)}")
    if on_gpu:
        spans = [((e.begin_ns, e.end_ns), class_of_kernel(e.name) == COMMUNICATION) for e in device]
        collectives = [(e.name, (e.begin_ns, e.end_ns)) for e in device if class_of_kernel(e.name) == COMMUNICATION]
    else:
        # A node's hooks wait for communication; what it computes are operators inside it.
        operators = [e for e in host if e.kind in OPERATORS and not e.name.startswith((NODE, "c10d::"))]
        collectives = sorted(gloo_spans(events), key=lambda one: one[1])
        spans = [((e.begin_ns, e.end_ns), False) for e in operators] + [(span, True) for _, span in collectives]
    overlaps = [overlap_of(spans, ranges[name]) for name in steps]
    recorded = attribution.work
    if not on_gpu:
        recorded += [one for name in steps for one in gloo_work(collectives, name, ranges[name], attribution.phase_at)]
    if on_gpu:
        parts = [(one, stretches(Recording(host, device), one)) for one in attribution.windows]
    else:
        loads = loading(Recording(host, device))
        parts = [
            (step, cpu_stretches(step, overlap, loads))
            for step, overlap in zip(attribution.steps, overlaps, strict=True)
        ]
    return OverlapRecording(overlaps, recorded, parts, collectives, lambda path: results.save(str(path)))


def cpu_stretches(step: Interval, overlap: StepOverlap, loading: Iterable[Span]) -> list[Stretch]:
    """Return the parts of a CPU's step: operators run, only a collective does, a loader does, or the host itself."""
    begin = step.begin_ns
    found = [Stretch(begin + first, begin + last, RUNNING, begin + first) for first, last in overlap.compute]
    rest = without([(0, overlap.length_ns)], overlap.compute)
    loads = merged((max(0, first - begin), last - begin) for first, last in loading if last > begin)
    for cause, spans in (("communication", overlap.communication), ("input", loads), ("host", rest)):
        left = without(rest, spans) if cause != "host" else []
        found += [Stretch(begin + first, begin + last, cause, begin + first) for first, last in without(rest, left)]
        rest = left
    return sorted(found, key=lambda one: one.begin_ns)


def gloo_work(
    collectives: Iterable[tuple[str, Span]], step: str, within: Span, phase_at: Callable[[int], Interval | None]
) -> Iterator[RecordedWork]:
    """Yield gloo's operations in a step, which run beside the operators, each in the phase in which it was issued."""
    number = int(step.rpartition("_")[2])
    for name, (begin, end) in collectives:
        if within[0] <= begin < within[1]:
            phase = phase_at(begin)
            yield RecordedWork(name, "operator", begin, end, end - begin, number, "" if phase is None else phase.name)


def gloo_spans(events: Iterable[Any]) -> Iterator[tuple[str, Span]]:
    """Yield names and spans of gloo's operations, which its own threads end."""
    for event in events:
        if event.is_async() and event.name().startswith(GLOO):
            yield event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())


def overlap_of(spans: Iterable[tuple[Span, bool]], step: Span) -> StepOverlap:
    """Cut spans, each with whether it is communication, to a step."""
    begin, end = step
    kinds: tuple[list[Span], list[Span]] = ([], [])
    for (first, last), communicates in spans:
        if first < end and last > begin:
            kinds[communicates].append((max(first, begin) - begin, min(last, end) - begin))
    return StepOverlap(end - begin, merged(kinds[False]), merged(kinds[True]))
