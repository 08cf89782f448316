"""Puts every moment of a profiled step on a GPU into one class: a kernel runs, or why none does.

The union of the device's work is clipped to the step, so that busy and idle time add up to it. A gap ends with the work
that begins then, whose launch says what the device waited for:

- Launched after the gap had begun: the host was late. It was in a loader (`input`); in a call that waits for the device
  or reads a number of it (`synchronisation`), which also is to blame for what follows until the next launch, but for
  `host`, since the device had run dry; in an optimizer's step (`optimizer`); collecting garbage or compiling (`host`);
  in operators (`launches`), or for longer than HOST_NS in none that launches work (`host`).
- Launched before: the device was slow to start it (`launches`, or `optimizer`), or waited for another stream
  (`unexplained`).
- Part of the same CUDA graph as the work before: of the graph itself (`kernels`); the host has no part in it.

Time in which only copies run is `copies`, in which only collectives run `communication`.
"""

import bisect
import gc
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.clock import unix_ns
from kernels.ranges import named, record_ranges
from workers.measure.profiling.attribution import Interval, own_steps, parents
from workers.measure.profiling.classes import COMMUNICATION, class_of_kernel
from workers.measure.profiling.recording import NODE, DeviceEvent, HostEvent, Recording
from workers.measure.profiling.replay import Replay
from workers.measure.spans import merged

RUNNING = "running"
"""The class of time in which a kernel runs that is no collective."""
WORKING = (RUNNING, "communication", "copies")
"""The classes of time in which the device works."""
COLLECTS = "garbage collection"
"""The range around a run of Python's garbage collector (`collections_named`)."""
COMPILING = " (dynamo_timed)"
"""The end of the names of ranges in which torch.compile compiles."""
UNSLOWED = ("input", "host", "kernels", COLLECTS)
"""The classes of idle time that a profiler does not lengthen."""
LOADER = re.compile(r"enumerate\(DataLoader\)#")
"""Ranges that torch's loaders open around `__next__`."""
INPUT_PHASES = ("data", "input", "load", "loader", "batch", "dataloader")
"""Phases in which users get their batches."""
FREES = re.compile(r"cudaFree(Host)?")
SYNCHRONISES = re.compile(
    rf"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize.*|(cuda|cu)Memcpy(?!.*Async).*|{FREES.pattern}"
)
"""Calls that return when the device has done what was asked of it before, also those that give it memory back."""
UPDATES = re.compile(r"Optimizer\.step#")
"""Ranges that torch opens around an optimizer's step."""
READS = "numbers read"
"""The range around the text that is made of a tensor (`reads_named`)."""
READING = re.compile(rf"aten::(item|_local_scalar_dense|is_nonzero|to|_to_copy|copy_)|{READS}")
"""Operators and ranges that read numbers of the device, if a copy to the host or a call that waits is inside."""
BLOCKING_NS = 50_000
"""An asynchronous copy of memory that is not pinned whose call takes longer has waited for the device."""
PAGEABLE = "Pageable"
"""Part of the name of a copy from or to memory that is not pinned."""
TO_HOST = "DtoH"
"""Likewise, of a copy to the host. To memory that is not pinned, its call ends when the copy does."""
ON_DEVICE = re.compile(r"Memset|Memcpy DtoD")
"""Copies and fills that are work as kernels are."""
IN_PYTHON = re.compile(rf"({NODE})?(?!\w*Compiled)\w+(?<!Backward\d)|Torch-Compiled Region.*")
"""What may do anything: functions of autograd that are written in Python, such as `Mine` and `MineBackward` or those of
checkpoints (others have a namespace, or a number behind `Backward`), and what runs behind a graph break."""
HOST_NS = 100_000
"""A longer time in no operator is the host's own, and so is that in an operator that launches nothing."""
NEAR_NS = 250_000
"""A shorter operator within this time of a launch lies between two that launch work: it may make a view."""
START_NS = 20_000
"""A kernel whose launch was earlier by more waited for another stream."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step, of one class."""

    begin_ns: int
    end_ns: int
    cause: str
    """RUNNING, or a cause (workers.changes.Cause)."""
    at_ns: int
    """The host's moment that explains it: its line is the line to look at."""
    next: str | None = None
    """Name of the work that ends a gap; None at the step's end, and where work runs."""
    collects: bool = False
    """Whether the host collected garbage."""
    then: str | None = None
    """The cause if the host, which had waited, had not: what it issued in this time, it has to issue anyway."""

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


def stretches(recording: Recording, step: Interval) -> list[Stretch]:
    """Return the parts of a step, in order and without gaps, from its beginning until host and device have ended it.
    `step`: the step, as the host ran its phases."""
    return _Timeline(recording).between(step, step.begin_ns, isolated=True)


def in_a_row(recording: Recording, steps: Sequence[Interval]) -> list[list[Stretch]]:
    """Return the parts of steps that followed each other, the host ahead of the device: each step lasts from the end of
    the device's work of the step before to the end of its own; the last one also until its host has ended it, so that
    as many ends of steps are in it as beginnings."""
    timeline = _Timeline(recording)
    found = []
    before = [one.end_ns for one in recording.device if timeline.launched_ns(one) < steps[0].begin_ns] if steps else []
    begin = max([steps[0].begin_ns, *before]) if steps else 0
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        until = step.end_ns if after is None else after.begin_ns
        parts = timeline.between(replace(step, end_ns=until), begin, isolated=after is None)
        found.append([part for one in parts for part in _parted(one, step.begin_ns)])
        begin = found[-1][-1].end_ns if found[-1] else begin
    return found


def _parted(one: Stretch, begin_ns: int) -> list[Stretch]:
    """Return an idle part from before a step's beginning as two, of which the later is due to the new step; waiting is
    due to the call that waits."""
    if one.cause in WORKING or not one.begin_ns < begin_ns < one.end_ns:
        return [one]
    moments = (one.at_ns, one.at_ns) if one.cause == "synchronisation" else (one.begin_ns, begin_ns)
    return [replace(one, end_ns=begin_ns, at_ns=moments[0]), replace(one, begin_ns=begin_ns, at_ns=moments[1])]


def synchronisations(recording: Recording) -> list[HostEvent]:
    """Return the calls in which the host waited for the device."""
    pageable = {one.launch for one in recording.device if PAGEABLE in one.name}
    to_host = {one.launch for one in recording.device if PAGEABLE in one.name and TO_HOST in one.name}
    return [event for event in recording.host if _synchronises(event, pageable, to_host)]


def host_reads(recording: Recording) -> list[tuple[int, int]]:
    """Return when the host read numbers of the device, such as in `.item()`, from the beginning of the operator that
    reads to its end; disjoint, in order."""
    copies = {one.launch for one in recording.device if one.kind == "copy"}
    to_host = {one.launch for one in recording.device if TO_HOST in one.name}
    waits = {one.id for one in synchronisations(recording) if not FREES.fullmatch(one.name)}
    reading = waits - (copies - to_host)
    calls = sorted(one.begin_ns for one in recording.host if one.kind == "launch" and one.id in reading)
    others = sorted(one.begin_ns for one in recording.host if one.kind == "launch" and one.id in copies - to_host)
    found = []
    for one in recording.host:
        reads = one.kind != "launch" and READING.fullmatch(one.name) and _any_in(calls, one)
        if reads and (one.name == READS or not _any_in(others, one)):
            found.append((one.begin_ns, one.end_ns))
    return merged(found)


def inside(intervals: Sequence[tuple[int, int]]) -> Callable[[int], bool]:
    """Return a function that tells whether a moment lies in one of these disjoint intervals, which are in order."""
    begins = [begin for begin, _ in intervals]

    def lies(at_ns: int) -> bool:
        index = bisect.bisect_right(begins, at_ns) - 1
        return index >= 0 and at_ns < intervals[index][1]

    return lies


def _any_in(moments: Sequence[int], event: HostEvent, around_ns: int = 0) -> bool:
    at = bisect.bisect_left(moments, event.begin_ns - around_ns)
    return at < len(moments) and moments[at] < event.end_ns + around_ns


def without_waiting_ms(recording: Recording, steps: Sequence[Interval], step_ms: float, *, cause: str) -> float:
    """Return what a step of `step_ms` would take if the host never waited for input, or for the device, of which it
    then reads nothing. `recording`: of the steps and, before them, of a warm-up. `step_ms`: the time of a step without
    a profiler. `cause`: "input" or "synchronisation"."""
    waiting = merged((one.begin_ns, one.end_ns) for one in synchronisations(recording))
    # What a call that waits launches itself, such as a copy, is not left out.
    calls = ((begin + 1, end) for begin, end in waiting)
    loads = loading(recording)
    skippable = loads if cause == "input" else merged([*host_reads(recording), *calls])
    replay = Replay(recording, steps, waiting, skippable, loads)
    scale = replay.scale_for(1e6 * step_ms)
    return step_ms * min(1.0, replay.length_ns(scale, whole=False) / (replay.length_ns(scale) or 1.0))


def loading(recording: Recording) -> list[tuple[int, int]]:
    """Return when the host was in the `__next__` of a loader, or in a phase of a step that is named as one of
    INPUT_PHASES; disjoint, in order."""
    events = [one for one in recording.host if one.kind == "range"]
    above = parents(events)
    steps = own_steps(events, above)
    return merged(
        (one.begin_ns, one.end_ns)
        for one, parent in zip(events, above, strict=True)
        if LOADER.match(one.name) or (parent in steps and one.name in INPUT_PHASES)
    )


def updating(events: Sequence[HostEvent]) -> list[tuple[int, int]]:
    """Return when optimizers update parameters: after the backward pass of a closure that they are given."""
    backward = sorted((one.begin_ns, one.end_ns) for one in events if one.kind == "backward")
    found = []
    for begin, end in merged((one.begin_ns, one.end_ns) for one in events if UPDATES.match(one.name)):
        inside_of_it = backward[bisect.bisect_left(backward, (begin,)) : bisect.bisect_left(backward, (end,))]
        found.append((max([begin, *(until for _, until in inside_of_it)]), end))
    return found


@contextmanager
def reads_named() -> Iterator[None]:
    """Name the texts that are made of tensors for the profiler: their numbers are read."""

    def reading(plain: Any) -> Any:
        def read(*given: Any, **options: Any) -> Any:
            with named(READS):
                return plain(*given, **options)

        return read

    with ExitStack() as undo:
        for name in ("__repr__", "__format__"):
            plain = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, reading(plain))
            undo.callback(setattr, torch.Tensor, name, plain)
        yield


@contextmanager
def collections_named() -> Iterator[list[int]]:
    """Name the runs of the garbage collector for the profiler. Yields a list that gets the ns of each."""
    taken: list[int] = []
    open_ranges: list[tuple[ExitStack, int]] = []

    def on_collection(phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            stack = ExitStack()
            if not torch._C._len_torch_dispatch_stack():  # else a compiler that traces takes the range for an operator
                stack.enter_context(named(COLLECTS))
            open_ranges.append((stack, unix_ns()))
        elif open_ranges:
            stack, begun = open_ranges.pop()
            taken.append(unix_ns() - begun)
            stack.close()

    with record_ranges(), named(COLLECTS):
        pass  # the first range imports modules, which in an import that is collected in fails
    gc.callbacks.append(on_collection)
    try:
        yield taken
    finally:
        gc.callbacks.remove(on_collection)


class _Timeline:
    """The work of a recording's device, and what the host did meanwhile."""

    def __init__(self, recording: Recording) -> None:
        self._device, self._host = recording.device, _Host(recording)
        self._launches = {event.id: event for event in recording.host if event.kind == "launch"}

    def launched_ns(self, one: DeviceEvent) -> int:
        launch = self._launches.get(one.launch)
        return one.begin_ns if launch is None else launch.begin_ns

    def between(self, step: Interval, begin_ns: int, *, isolated: bool) -> list[Stretch]:
        """Return the parts from a moment to the end of the step: that of its work or, if it is isolated or has none,
        also of the host."""
        work = [one for one in self._device if step.begin_ns <= self.launched_ns(one) < step.end_ns]
        ends = [one.end_ns for one in work]
        end = max([*ends, step.end_ns] if isolated or not ends else ends)
        found: list[Stretch] = []
        last: DeviceEvent | None = None
        for begin, until, running, after in _levels(work, begin_ns, end):
            if running:
                first = min(running, key=lambda one: WORKING.index(_class(one)))
                found.append(Stretch(begin, until, _class(first), self.launched_ns(first)))
                last = max(running, key=lambda one: one.end_ns)
            else:
                found += _gap(begin, until, last, after, self._launches, self._host)
        return found


def sums(found: Sequence[Stretch]) -> Counter[str]:
    """Return the ns of each class."""
    totals: Counter[str] = Counter()
    for one in found:
        totals[one.cause] += one.ns
    return totals


def unprofiled(totals: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the time of each class in a step that no profiler has slowed down and that takes `step`. `totals`: their
    times in a profiled one, in the same unit.

    A profiler lengthens operators and launches, and neither the device's work nor plain Python: the gaps due to the
    former fill what the latter leave of the step.
    """
    left = max(0.0, step - sum(totals.get(cause, 0.0) for cause in WORKING))
    plain = sum(totals.get(cause, 0.0) for cause in UNSLOWED)
    slowed = sum(totals.values()) - plain - sum(totals.get(cause, 0.0) for cause in WORKING)
    of_plain = min(plain, left) if slowed > 0 else left
    scales = dict.fromkeys(WORKING, 1.0) | dict.fromkeys(UNSLOWED, of_plain / (plain or 1.0))
    of_others = (left - of_plain) / (slowed or 1.0)
    return {cause: time * scales.get(cause, of_others) for cause, time in totals.items()}


def of_steps(recording: Recording, steps: Sequence[Interval], step_ms: float) -> tuple[list[Stretch], dict[str, float]]:
    """Return the parts of some profiled steps, and the ms of each class in a step of `step_ms` without a profiler."""
    found = [one for step in steps for one in stretches(recording, step)]
    times = {cause: 1e-6 * ns / max(1, len(steps)) for cause, ns in sums(found).items()}
    return found, unprofiled(times, step_ms)


def _class(work: DeviceEvent) -> str:
    if work.kind != "kernel" and not ON_DEVICE.match(work.name):
        return "copies"
    return "communication" if class_of_kernel(work.name) == COMMUNICATION else RUNNING


def _levels(
    work: Sequence[DeviceEvent], begin: int, end: int
) -> Iterator[tuple[int, int, Sequence[DeviceEvent], DeviceEvent | None]]:
    """Yield the intervals in which the same work runs: beginning, end, that work, and the work that begins next."""
    waiting = sorted(work, key=lambda one: one.begin_ns)[::-1]
    running: list[DeviceEvent] = []
    at = begin
    while at < end:
        while waiting and waiting[-1].begin_ns <= at:
            running.append(waiting.pop())
        running = [one for one in running if one.end_ns > at]
        after = waiting[-1] if waiting else None
        until = min([end, *(one.end_ns for one in running), *([after.begin_ns] if after else [])])
        yield at, until, tuple(running), after
        at = until


class _Host:
    """What the host did at each moment, on the threads that launch work."""

    def __init__(self, recording: Recording) -> None:
        events = recording.host
        self.loading = loading(recording)
        calls = [(one.begin_ns, one.end_ns) for one in synchronisations(recording)]
        self.waiting = merged([*calls, *host_reads(recording)])
        self._calls = sorted(begin for begin, _ in calls)
        self.updating = updating(events)
        self.updates = inside(self.updating)
        self.collecting = merged((one.begin_ns, one.end_ns) for one in events if one.name == COLLECTS)
        self.compiling = merged((one.begin_ns, one.end_ns) for one in events if one.name.endswith(COMPILING))
        issued = sorted(one.begin_ns for one in events if one.kind == "launch")

        def issues(one: HostEvent) -> bool:
            if one.end_ns - one.begin_ns <= HOST_NS:
                return _any_in(issued, one, NEAR_NS)
            return one.kind == "launch" or (not IN_PYTHON.fullmatch(one.name) and _any_in(issued, one))

        operators = (one for one in events if one.kind not in ("range", "python"))
        self.issuing = merged((one.begin_ns, one.end_ns) for one in operators if issues(one))

    def compile_at(self, moment_ns: int) -> int:
        """Return when the compilation of this moment began: operators that it runs have other lines."""
        return self.compiling[bisect.bisect_right(self.compiling, (moment_ns, math.inf)) - 1][0]

    def call_at(self, moment_ns: int) -> int:
        """Return when the call began that waits in the read or call of this moment."""
        begin, end = self.waiting[bisect.bisect_right(self.waiting, (moment_ns, math.inf)) - 1]
        at = bisect.bisect_left(self._calls, begin)
        return self._calls[at] if at < len(self._calls) and self._calls[at] < end else begin


def _synchronises(event: HostEvent, pageable: Set[int], to_host: Set[int]) -> bool:
    if event.kind != "launch":
        return False
    if event.id in to_host:
        return True
    slow = event.end_ns - event.begin_ns > BLOCKING_NS
    return bool(SYNCHRONISES.fullmatch(event.name)) or (slow and event.id in pageable)


def _gap(
    begin: int,
    end: int,
    before: DeviceEvent | None,
    after: DeviceEvent | None,
    launches: dict[int, HostEvent],
    host: _Host,
) -> Iterator[Stretch]:
    """Yield the parts of a gap in the device's work."""
    launch = None if after is None else launches.get(after.launch)
    if before is not None and after is not None and before.launch == after.launch:
        yield Stretch(begin, end, "kernels", begin if launch is None else launch.begin_ns, after.name)
        return
    name = None if after is None else after.name
    issued = end if after is None else begin if launch is None else min(max(begin, launch.begin_ns), end)
    yield from _late(begin, issued, host, name)
    if end > issued:
        known = (launch is not None and issued > begin) or end - begin <= START_NS
        updates = launch is not None and host.updates(launch.begin_ns)
        yield Stretch(issued, end, ("optimizer" if updates else "launches") if known else "unexplained", issued, name)


def _late(begin: int, end: int, host: _Host, name: str | None) -> Iterator[Stretch]:
    """Yield the parts of the time in which the device had nothing to do, since the host was late."""
    # The host waited until the device had run dry: until the next launch, all is due to that.
    dry = next((one for one in host.waiting if one[0] <= begin <= one[1] + START_NS), None)
    for at, until, in_loader in _cut(begin, end, host.loading):
        if in_loader:
            yield Stretch(at, until, "input", at, name)
        elif dry is not None:
            call, waited = host.call_at(dry[0]), min(max(at, dry[1]), until)
            if at < waited:
                yield Stretch(at, waited, "synchronisation", call, name)
            for part in _busy_host(waited, until, host, name):
                is_own = part.cause == "host"
                yield part if is_own else replace(part, cause="synchronisation", at_ns=call, then=part.cause)
        else:
            for since, last, waiting in _cut(at, until, host.waiting):
                if waiting:
                    yield Stretch(since, last, "synchronisation", host.call_at(since), name)
                else:
                    yield from _busy_host(since, last, host, name)


def _busy_host(begin: int, end: int, host: _Host, name: str | None) -> Iterator[Stretch]:
    for at, until, collects in _cut(begin, end, host.collecting):
        if collects:
            yield Stretch(at, until, "host", at, name, collects=True)
            continue
        for since, last, compiles in _cut(at, until, host.compiling):
            if compiles:
                yield Stretch(since, last, "host", host.compile_at(since), name)
            else:
                yield from _issuing_host(since, last, host, name)


def _issuing_host(begin: int, end: int, host: _Host, name: str | None) -> Iterator[Stretch]:
    for at, until, updates in _cut(begin, end, host.updating):
        if updates:
            yield Stretch(at, until, "optimizer", at, name)
            continue
        since = at
        for first, last, issuing in _cut(at, until, host.issuing):
            if not issuing and last - first > HOST_NS:
                if since < first:
                    yield Stretch(since, first, "launches", since, name)
                yield Stretch(first, last, "host", (first + last) // 2, name)
                since = last
        if since < until:
            yield Stretch(since, until, "launches", since, name)


def _cut(begin: int, end: int, intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts into which disjoint intervals cut a time: beginning, end, and whether it is inside of one."""
    at = begin
    for one, other in intervals[max(0, bisect.bisect_left(intervals, (begin, begin)) - 1) :]:
        if other <= at:
            continue
        if max(one, at) >= end:
            break
        if one > at:
            yield at, one, False
        since, at = max(one, at), min(other, end)
        yield since, at, True
    if at < end:
        yield at, end, False
