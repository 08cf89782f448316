"""Records the allocations on a GPU, through the history of torch's caching allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from kernels.device_events import keep_peaks, reset_peaks
from workers.measure.allocations.categories import UNKNOWN, Owners
from workers.measure.allocations.free import free_at
from workers.measure.allocations.ledger import WORKSPACE, Allocation, Entry, Ledger
from workers.measure.allocations.recording import MAX_POINTS, Counters, RecordedStretch
from workers.measure.allocations.snapshot import BEFORE, Snapshot, annotated, blocks_of, reserved_in

_active: list[CudaRecording] = []
"""The active recording, if any: torch's observer, which cannot be removed, sets its `at_oom` when memory runs out."""
_attached = False
COMMON = (0, 0)
"""The pool of memory outside of CUDA graphs."""


class CudaRecording:
    """Records the allocator: call `begin`, `mark` at the end of each phase, and `end`; then it may begin again."""

    def __init__(self, device: torch.device, max_entries: int) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.max_entries = max_entries
        self.at_oom: Snapshot | None = None
        """The allocator's state when memory ran out; None if it did not since the last mark."""
        self._ledger = Ledger()
        self._workspaces: Counter[int] = Counter()
        """Number of cuBLAS workspaces by their size."""

    def begin(self, owners: Owners, *, stacks: bool = True) -> None:
        """Begin a history. `stacks`: False records no stacks on a CPU, where they are too many while a compiler
        runs."""
        # Makes sure that there is an allocator to record.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _attach(self)
        keep_peaks()
        torch.cuda.memory._record_memory_history(None)  # drops the former history
        # Not "all": for stacks of releases torch 2.11 loses an exception that passes them: a checkpoint's early stop.
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=self.max_entries)
        self._recorded: list[RecordedStretch] = []
        self._last: list[Entry] = []
        snapshot = _take()
        blocks = blocks_of(snapshot, self.device)
        for address, one in blocks.items():
            former, owner = self._ledger.alive.get(address), owners.get(address)
            if former is not None and former.size == one.size:
                one.made_in = former.made_in
            if owner is not None:
                one.category, one.name = owner.category, owner.name
        name_workspaces(blocks.values(), self._workspaces)
        self._ledger = Ledger(blocks.values(), MAX_POINTS)
        # Taking the snapshot is in the history, too.
        entries, _ = self._new_entries(snapshot)
        self._ledger.categories, self._ledger.phases = [UNKNOWN] * len(entries), [BEFORE] * len(entries)
        reset_peaks(self.device)

    def measure_workspaces(self) -> None:
        """Release the workspaces that libraries keep for matrix products, to learn their sizes.

        Call it before a warm-up step: the step allocates them again, and the following `begin` names them.
        """
        snapshot = _take()
        if any(one["active_size"] for one in snapshot["segments"] if one.get("segment_pool_id", COMMON) != COMMON):
            return  # a graph that was captured uses its own on, and allocates no others
        # Torch does not list its workspaces: find the blocks that its function for releasing them releases.
        before = blocks_of(snapshot, self.device)
        torch._C._cuda_clearCublasWorkspaces()
        after = blocks_of(_take(), self.device)
        self._workspaces = Counter(one.size for address, one in before.items() if address not in after)

    def mark(
        self, phase: str, owners: Owners, *, keep: bool = False, alive: bool = False, failed: bool = False
    ) -> None:
        """End a stretch, in which `phase` ran, and begin the next one. `keep`: make a snapshot of the history from the
        beginning up to here. `alive`: keep the list of the living allocations. `failed`: the phase ran out of memory;
        the snapshot is of that moment if the allocator reported it."""
        snapshot = self.at_oom if failed and self.at_oom is not None else _take()
        self.at_oom = None  # a library may have recovered from it
        counters = self._counters()
        entries, lost = self._new_entries(snapshot)
        stretch = self._ledger.follow(
            phase,
            entries,
            owners,
            blocks=blocks_of(snapshot, self.device),
            lost=lost,
            reserved=reserved_in(snapshot, self.device),
        )
        history = len(self._last)
        full = history >= self.max_entries
        kept = annotated(snapshot, self.device, self._ledger, phase=phase, lost=full) if keep else None
        held = list(self._ledger.alive.values()) if alive else None
        free = free_at(snapshot, self.device, entries[stretch.peak.entry + 1 :], stretch.at_peak)
        self._recorded.append(RecordedStretch(stretch, counters, kept, history, full, held, free))
        reset_peaks(self.device)

    def end(self) -> list[RecordedStretch]:
        """End the history, and return its stretches in order."""
        self.abandon()
        recorded, self._recorded = self._recorded, []
        self._last = []
        return recorded

    def abandon(self) -> None:
        torch.cuda.memory._record_memory_history(None)
        _active.clear()

    def _new_entries(self, snapshot: Snapshot) -> tuple[list[Entry], bool]:
        """Return the history since the last call, and whether its beginning is lost."""
        trace: list[Entry] = snapshot["device_traces"][self.device]
        before, self._last = self._last, trace
        if len(trace) < self.max_entries:
            return trace[len(before) :], False
        if not before:
            return trace, True
        last = _key(before[-1])
        for position in range(len(trace) - 1, -1, -1):
            if _key(trace[position]) == last:
                return trace[position + 1 :], False
        return trace, True

    def _counters(self) -> Counters:
        stats = torch.cuda.memory_stats(self.device)
        return Counters(
            allocated_peak=stats["allocated_bytes.all.peak"],
            allocated_end=stats["allocated_bytes.all.current"],
            requested_peak=stats["requested_bytes.all.peak"],
            reserved_peak=stats["reserved_bytes.all.peak"],
            reserved_end=stats["reserved_bytes.all.current"],
        )


def name_workspaces(blocks: Iterable[Allocation], sizes: Counter[int]) -> None:
    """Name blocks without an owner as workspaces, at most as many as there are of each size."""
    remaining = sizes.copy()
    for block in blocks:
        if block.category == UNKNOWN and remaining[block.size] > 0:
            remaining[block.size] -= 1
            block.name = WORKSPACE


def _take() -> Snapshot:
    snapshot: Snapshot = torch.cuda.memory._snapshot()
    return snapshot


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry["action"], entry.get("addr"), entry.get("size"), entry.get("time_us")


def _attach(recording: CudaRecording) -> None:
    """Make this recording the one whose `at_oom` is set when memory runs out."""
    global _attached
    _active[:] = [recording]
    if not _attached:
        torch._C._cuda_attach_out_of_memory_observer(_on_out_of_memory)  # type: ignore[attr-defined]
        _attached = True


def _on_out_of_memory(_device: int, _requested: int, _total: int, _free: int) -> None:
    """Store the allocator's state, before the error's handlers release memory."""
    for recording in _active:
        recording.at_oom = _take()
