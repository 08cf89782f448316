"""Assigns each piece of work to its step and phase, to the named ranges around it, and to its operator.

Work belongs to the phase in which the host launched it, even if the device runs it later. A kernel of the backward pass
belongs to the range in which the forward pass made its autograd node: node and forward operator share a sequence
number. Work inside a range of the backward pass itself (a recomputed layer) belongs to that range. Where the code has
a range of its own around the backward pass, its work belongs to that and, inside of it, to the module of its node.

On a CPU there are no kernels; the work is the operators, each with its self time: without the operators that it calls.
"""

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from workers.measure.profiling.products import Product
from workers.measure.profiling.recording import DeviceEvent, HostEvent, Recording

WorkKind = Literal["kernel", "copy", "fill", "operator"]
STEP = re.compile(r"step_(\d+)|warmup")
"""Names of the ranges of steps (workers.measure.ranges). Code in a step may use them, too: see `own_steps`."""
OUTSIDE = "outside"
"""The range of work outside all ranges."""
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """A kernel, copy or fill, or on a CPU an operator."""

    name: str
    kind: WorkKind
    begin_ns: int
    end_ns: int
    time_ns: int
    """Time on the device; of an operator, its self time."""
    step: int
    phase: str
    ranges: tuple[str, ...] = ()
    """Names of the ranges inside the phase that it belongs to, the outermost first."""
    operator: str | None = None
    """Name of the operator that launched it, or None if that is unknown; of an operator, its own name."""
    launch_to_start_us: float | None = None
    """Time from the beginning of the launching call to the beginning of the work; None for operators, and for work
    that a CUDA graph launched."""
    made_ns: int = 0
    """The host's moment that the work is due to: its launch or, in a backward pass, the forward operator that made the
    node. 0 for operators."""
    shapes: str = ""
    """The shapes of the operator's inputs, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator."""

    name: str
    step: int
    phase: str
    self_ns: int
    """Time on the host, without that of the operators that it calls."""
    device_ns: int
    """Time of the device work that it launched itself."""
    total_ns: int = 0
    """Time on the host with that of the operators that it calls; 0 inside a call of the same operator."""
    device_total_ns: int = 0
    """The same of the device's work."""
    cpu_bytes: int = 0
    """Allocated less released by the call and what it calls; 0 inside a call of the same operator."""
    device_bytes: int = 0
    product: Product | None = None
    """The product that it computes; None if it is not a matrix product or the shapes are unknown."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A step or a phase of one, as the host ran it."""

    name: str
    step: int
    begin_ns: int
    end_ns: int


class Attribution:
    """The step, phase, ranges and operator of all work of a recording. `on_gpu`: whether the work is that of a GPU, or
    the operators of a CPU. `modules`: names of ranges that are modules."""

    def __init__(
        self, recording: Recording, phases: Collection[str], *, on_gpu: bool, modules: Collection[str] = ()
    ) -> None:
        self._device, self._memory = recording.device, recording.memory
        self._on_gpu, self._modules = on_gpu, frozenset(modules)
        self._events = [event for event in recording.host if event.kind not in ("launch", "python")]
        self._launches = {event.id: event for event in recording.host if event.kind == "launch"}
        self._parents = parents(self._events)
        self._steps = own_steps(self._events, self._parents)
        self._phase_names = frozenset(phases)
        self._by_id = {event.id: index for index, event in enumerate(self._events)}
        self._makers = self._find_makers()
        self._paths: dict[int, tuple[str, ...]] = {}

    @cached_property
    def steps(self) -> list[Interval]:
        """The steps, without the warm-up."""
        found = ((self._events[index], number) for index, number in self._steps.items() if number)
        return [Interval(event.name, number, event.begin_ns, event.end_ns) for event, number in found]

    @cached_property
    def phases(self) -> list[Interval]:
        phases = []
        for event, parent in zip(self._events, self._parents, strict=True):
            number = None if parent is None else self._steps.get(parent)
            if number and event.kind == "range" and event.name in self._phase_names:
                phases.append(Interval(event.name, number, event.begin_ns, event.end_ns))
        return phases

    @property
    def windows(self) -> list[Interval]:
        """The steps from the beginning of their first phase to the end of their last one.

        A step's own range also holds the wait for work that was launched before it.
        """
        windows = []
        for step in self.steps:
            phases = [phase for phase in self.phases if phase.step == step.step]
            windows.append(Interval(step.name, step.step, phases[0].begin_ns, phases[-1].end_ns))
        return windows

    @cached_property
    def work(self) -> list[RecordedWork]:
        """All work of the steps' phases, in the order in which it began."""
        return self._device_work() if self._on_gpu else self._host_work()

    @cached_property
    def calls(self) -> list[Call]:
        """All calls of operators in the steps' phases."""
        launched = Counter[int]()
        for work in self._device:
            operator = self._operator_of(work)
            if operator is not None:
                launched[operator] += work.end_ns - work.begin_ns
        cpu, gpu = Counter[int](), Counter[int]()
        for one in self._memory:
            at = self._around(one.thread, one.at_ns, one.at_ns)
            if at is not None:
                (gpu if one.on_gpu else cpu)[at] += one.bytes
        device_ns, cpu, gpu = map(self._with_called, (launched, cpu, gpu))
        # A dispatch mode of torch, such as that of selective checkpoints, calls the operator again inside of its call.
        around_products = {
            above for index, event in enumerate(self._events) if event.product for above in self._above(index)
        }
        calls = []
        for index, event in enumerate(self._events):
            phase = None if event.kind == "range" else self.phase_at(event.begin_ns)
            if phase is None:
                continue
            own, whole = self._self_times[index], (0, 0, 0, 0)
            if not self._is_inside_itself(index):
                whole = event.end_ns - event.begin_ns, device_ns[index], cpu[index], gpu[index]
            # A checkpoint ends its recomputation inside of the call after its last tensor, which then makes no result.
            # One that launches has run, also where an allocator of the user's own tells nothing.
            ran = not self._memory or event.given_out or cpu[index] or gpu[index] or device_ns[index]
            product = event.product if ran and index not in around_products else None
            calls.append(Call(event.name, phase.step, phase.name, own, launched[index], *whole, product))
        return calls

    def _with_called(self, own: Counter[int]) -> Counter[int]:
        """Return the sums for events and all that they enclose, from those of each event alone."""
        sums = own.copy()
        for index in range(len(self._events) - 1, -1, -1):
            parent = self._parents[index]
            if parent is not None and sums[index]:
                sums[parent] += sums[index]
        return sums

    def _above(self, index: int) -> Iterator[int]:
        """Yield the events around one, the innermost first."""
        while (parent := self._parents[index]) is not None:
            yield (index := parent)

    def _is_inside_itself(self, index: int) -> bool:
        return any(self._events[above].name == self._events[index].name for above in self._above(index))

    def phase_at(self, time_ns: int) -> Interval | None:
        """Return the phase that the host was in; None: outside the steps, or between two phases."""
        place = bisect.bisect_right(self._phase_begins, time_ns) - 1
        return self.phases[place] if place >= 0 and time_ns <= self.phases[place].end_ns else None

    def count_ranges(self) -> Counter[tuple[str, str]]:
        """Return how often each named range was entered in each phase of all steps, by (phase, name)."""
        counts = Counter[tuple[str, str]]()
        for index, event in enumerate(self._events):
            is_inside = event.kind == "range" and not self._is_step_or_phase(index)
            if is_inside and (phase := self.phase_at(event.begin_ns)):
                counts[phase.name, shown(event.name)] += 1
        return counts

    @cached_property
    def _phase_begins(self) -> list[int]:
        return [phase.begin_ns for phase in self.phases]

    @cached_property
    def _self_times(self) -> list[int]:
        """Each event's duration less that of the operators which it encloses."""
        times = [event.end_ns - event.begin_ns for event in self._events]
        for index, event in enumerate(self._events):
            parent = self._parents[index]
            # A range is no work: the operators in it are subtracted from the operator around the range.
            if event.kind == "range":
                continue
            while parent is not None and self._events[parent].kind == "range":
                parent = self._parents[parent]
            if parent is not None:
                times[parent] -= event.end_ns - event.begin_ns
        return [max(0, time) for time in times]

    def _host_work(self) -> list[RecordedWork]:
        work = []
        for index, event in enumerate(self._events):
            phase = None if event.kind == "range" else self.phase_at(event.begin_ns)
            if phase is not None:
                own, path = self._self_times[index], self._path(index)
                begin, end = event.begin_ns, event.end_ns
                work.append(
                    RecordedWork(
                        event.name, "operator", begin, end, own, phase.step, phase.name, path, event.name,
                        shapes=event.shapes,
                    )
                )  # fmt: skip
        return work

    def _device_work(self) -> list[RecordedWork]:
        sharing = Counter(event.launch for event in self._device)
        work = []
        for event in self._device:
            launch, index = self._launches.get(event.launch), self._operator_of(event)
            launched_ns = (launch or (event if index is None else self._events[index])).begin_ns
            phase = self.phase_at(launched_ns)
            if phase is None:
                continue
            delay = None if launch is None or sharing[event.launch] > 1 else 1e-3 * (event.begin_ns - launch.begin_ns)
            operator = None if index is None or self._events[index].kind == "range" else self._events[index].name
            path = () if index is None else self._path(index)
            time = event.end_ns - event.begin_ns
            work.append(
                RecordedWork(
                    event.name, event.kind, event.begin_ns, event.end_ns, time, phase.step, phase.name, path,
                    operator, delay, self._made_ns(index, launched_ns),
                    "" if index is None else self._events[index].shapes,
                )
            )  # fmt: skip
        return work

    def _made_ns(self, index: int | None, launched_ns: int) -> int:
        while index is not None:
            event = self._events[index]
            if event.kind == "backward" and event.sequence >= 0:
                maker = self._makers.get((event.forward_thread, event.sequence))
                if maker is not None:
                    return self._events[maker].begin_ns
            index = self._parents[index]
        return launched_ns

    def _operator_of(self, event: DeviceEvent) -> int | None:
        """Return the index of the operator or range that launched device work."""
        known = self._by_id.get(event.operator) if event.operator else None
        if known is not None:
            return known
        launch = self._launches.get(event.launch)
        return None if launch is None else self._around(launch.thread, launch.begin_ns, launch.end_ns)

    def _around(self, thread: int, begin_ns: int, end_ns: int) -> int | None:
        indices, begins = self._threads.get(thread, ([], []))
        place = bisect.bisect_right(begins, begin_ns) - 1
        index: int | None = indices[place] if place >= 0 else None
        while index is not None and self._events[index].end_ns < end_ns:
            index = self._parents[index]
        return index

    @cached_property
    def _threads(self) -> dict[int, tuple[list[int], list[int]]]:
        """The events' indices and beginnings by thread, in the order in which they began."""
        threads: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, event in enumerate(self._events):
            threads[event.thread][0].append(index)
            threads[event.thread][1].append(event.begin_ns)
        return threads

    def _find_makers(self) -> dict[tuple[int, int], int]:
        """Return the forward operator that made each autograd node, by the node's thread and number.

        An operator records the number that the next node of its thread will get, even if it makes none. So the last
        operator with a number made the node of that number.
        """
        return {
            (event.thread, event.sequence): index
            for index, event in enumerate(self._events)
            if event.kind == "operator" and event.sequence >= 0
        }

    def _is_step_or_phase(self, index: int) -> bool:
        """Return True for a range that a step or a phase of one is. Another range inside may have such a name, too."""
        parent = self._parents[index]
        return index in self._steps or (parent in self._steps and self._events[index].name in self._phase_names)

    def _path(self, index: int) -> tuple[str, ...]:
        """Return the names of the ranges that an event belongs to, below the phase, the outermost first."""
        if index not in self._paths:
            names, seen = list[str](), set[int]()
            at: int | None = index
            while at is not None and at not in seen:
                seen.add(at)
                event = self._events[at]
                if event.kind == "range":
                    if self._is_step_or_phase(at):
                        break
                    names.append(shown(event.name))
                maker = None
                if event.kind == "backward" and not names and event.sequence >= 0:
                    maker = self._makers.get((event.forward_thread, event.sequence))
                if maker is not None and maker < at and (path := self._called_in(event, maker)):
                    names = [*reversed(path)]
                    break
                at = self._parents[at] if maker is None else maker
            self._paths[index] = tuple(reversed(names))
        return self._paths[index]

    def _called_in(self, event: HostEvent, maker: int) -> tuple[str, ...]:
        """Return the ranges that are open where the backward pass of an event was called, and the module whose forward
        operator made its node; () if these ranges are around that operator, too."""
        at = self._around(self._events[next(iter(self._steps))].thread, event.begin_ns, event.begin_ns)
        while at is not None and self._events[at].kind != "range":
            at = self._parents[at]
        called, made = () if at is None else self._path(at), self._path(maker)
        if made[: len(called)] == called:
            return ()
        return (*called, *itertools.dropwhile(lambda name: name not in self._modules, made))


def parents(events: Sequence[HostEvent]) -> list[int | None]:
    """Return the index of each event's innermost enclosing event on its thread. `events`: in the order in which they
    began; of those that began together, the longest first."""
    parent_of: list[int | None] = []
    open_events: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        stack = open_events[event.thread]
        while stack and events[stack[-1]].end_ns < event.end_ns:
            stack.pop()
        parent_of.append(stack[-1] if stack else None)
        stack.append(index)
    return parent_of


def shown(name: str) -> str:
    """Return a range's name as tables have it: on one line, neither empty nor endless, and not that of no range."""
    line = " ".join(name.split())
    line = line if len(line) <= MAX_NAME else f"{line[: MAX_NAME - 1]}…"
    return {"": "(unnamed)", OUTSIDE: f"{OUTSIDE} (named so)"}.get(line, line)


def own_steps(events: Sequence[HostEvent], above: Sequence[int | None]) -> dict[int, int]:
    """Return the number of each step's range by its index, 0 for the warm-up: ranges of a step's name that no other one
    encloses, on the thread of the first of them. Code in the steps may call its own ranges so."""
    inside, steps = set[int](), dict[int, int]()
    for index, (event, parent) in enumerate(zip(events, above, strict=True)):
        if parent in inside:
            inside.add(index)
        elif event.kind == "range" and (match := STEP.fullmatch(event.name)):
            inside.add(index)
            if all(events[first].thread == event.thread for first in itertools.islice(steps, 1)):
                steps[index] = int(match[1] or 0)
    return steps
