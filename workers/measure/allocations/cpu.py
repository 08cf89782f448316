"""Records the allocations on a CPU, through the events of torch's profiler.

A CPU's allocator has neither blocks nor a cache, and torch reports the release of an allocation only if a profiler ran
when it was made, and runs again. So begin to record before the model is made, and collect garbage before a history
ends; older allocations are known only by their owners.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from workers.measure.allocations.categories import Owners
from workers.measure.allocations.ledger import Allocation, Entry, Ledger
from workers.measure.allocations.recording import MAX_POINTS, RecordedStretch
from workers.measure.allocations.snapshot import annotated, from_history
from workers.measure.profiling.recording import states_unread

MARK = "flopwatch::mark::"
"""Prefix of the names of events that represent marks; the mark's number follows."""


@dataclass(frozen=True)
class Mark:
    """The end of a stretch."""

    phase: str
    owners: Owners
    keep: bool
    alive: bool


class CpuRecording:
    """As `workers.measure.allocations.cuda.CudaRecording`."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._alive: dict[int, Allocation] = {}
        self._profile: Any = None
        self._undo = ExitStack()

    def begin(self, owners: Owners, *, stacks: bool = True) -> None:
        self._marks: list[Mark] = []
        self._before = [
            *allocations_of(owners, self._alive),
            # Torch reports the release of what an earlier profiler saw.
            *(
                Allocation(one.address, one.size, one.made_in, one.frames)
                for address, one in self._alive.items()
                if address not in owners
            ),
        ]
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=stacks)
        self._profile.start()
        self._undo.enter_context(states_unread())

    def measure_workspaces(self) -> None:
        """Do nothing: on a CPU, libraries do not allocate workspaces by torch's allocator."""

    def mark(
        self, phase: str, owners: Owners, *, keep: bool = False, alive: bool = False, failed: bool = False
    ) -> None:
        with record_function(f"{MARK}{len(self._marks)}"):
            self._marks.append(Mark(phase, owners, keep, alive))

    def end(self) -> list[RecordedStretch]:
        profiler = self._profile
        self.abandon()
        events = profiler.profiler.kineto_results.experimental_event_tree()
        ledger = Ledger(self._before, MAX_POINTS)
        recorded = stretches(history(events), self._marks, ledger, self.max_entries)
        self._alive = ledger.alive
        return recorded

    def abandon(self) -> None:
        self._undo.close()
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.stop()


def allocations_of(owners: Owners, known: Mapping[int, Allocation]) -> list[Allocation]:
    """Return the owners' allocations, with phase and stack if an earlier history knows them."""
    allocations = []
    for address, owner in owners.items():
        allocation, former = Allocation(address, owner.size, None), known.get(address)
        if former is not None and former.size == owner.size:
            allocation.made_in, allocation.frames = former.made_in, former.frames
        allocation.category, allocation.name = owner.category, owner.name
        allocations.append(allocation)
    return allocations


def stretches(
    parts: Iterable[list[Entry]], marks: Iterable[Mark], ledger: Ledger, max_entries: int
) -> list[RecordedStretch]:
    """Follow the histories between marks, and make snapshots at the marks with `keep`."""
    trace: list[Entry] = []
    recorded = []
    for entries, mark in zip(parts, marks, strict=True):
        stretch = ledger.follow(mark.phase, entries, mark.owners)
        trace += entries
        kept = trace[-max_entries:]
        lost = len(kept) < len(trace)
        made = from_history(kept, ledger.alive) if mark.keep else None
        snapshot = None if made is None else annotated(made, 0, ledger, phase=mark.phase, lost=lost)
        alive = list(ledger.alive.values()) if mark.alive else None
        recorded.append(RecordedStretch(stretch, None, snapshot, len(kept), lost, alive))
    return recorded


def history(events: Iterable[Any]) -> list[list[Entry]]:
    """Return the profiler's allocation events as entries of torch's history, in parts that end at the marks. `events`:
    the profiler's tree of events (`_ProfilerEvent`)."""
    parts: list[list[Entry]] = [[]]
    stacks: dict[Any, list[dict[str, Any]]] = {}
    seen = (one for one in _all(events) if one.tag in (_EventType.TorchOp, _EventType.Allocation))
    for event in sorted(seen, key=lambda one: one.start_time_ns):
        if event.tag == _EventType.TorchOp and event.name.startswith(MARK):
            parts[-1].append(_marked(event.start_time_ns // 1000))
            parts.append([])
        elif event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            parts[-1] += _entries(event, _stack(event.parent, stacks))
    return parts[:-1]


def _all(events: Iterable[Any]) -> Iterator[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        yield event
        pending += event.children


def _entries(event: Any, frames: list[dict[str, Any]]) -> list[Entry]:
    """Return one entry for an allocation, two for a release."""
    fields = event.extra_fields
    actions = ("alloc",) if fields.alloc_size > 0 else ("free_requested", "free_completed")
    return [
        {
            "action": action,
            "addr": fields.ptr,
            "size": abs(fields.alloc_size),
            "stream": 0,
            "time_us": event.start_time_ns // 1000,
            "frames": frames,
        }
        for action in actions
    ]


def _marked(time_us: int) -> Entry:
    """Return a history entry like that of torch's allocator for taking a snapshot."""
    return {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": time_us, "frames": []}


def _stack(event: Any, known: dict[Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the Python stack in which an event happened, the innermost frame first. The profiler sees calls, and not
    lines: an operator of the language, such as `a * b`, has the first line of its function."""
    called = _call(event)
    if called is None or called.tag == _EventType.PyCCall:
        return _callers(called, known)
    return [_frame(called.extra_fields.callsite), *_callers(called, known)]


def _callers(called: Any, known: dict[Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the stack of the line that made a call."""
    if called is None:
        return []
    key = called.id, called.start_time_ns
    if key not in known:
        frame, outer = _frame(called.extra_fields.caller), _callers(_call(called.parent), known)
        # A built-in function that calls another one has its caller's line.
        known[key] = outer if outer and outer[0] == frame else [frame, *outer]
    return known[key]


def _call(event: Any) -> Any:
    """Return the innermost call of Python in which an event happened, or which it is; None if there is none."""
    while event is not None and event.tag not in (_EventType.PyCall, _EventType.PyCCall):
        event = event.parent
    return event


def _frame(state: Any) -> dict[str, Any]:
    return {"filename": state.file_name, "line": state.line_number, "name": state.function_name}
