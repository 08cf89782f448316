"""Snapshots in torch's format (torch.cuda.memory._snapshot), with a category on each allocation, as files.

pytorch.org/memory_viz colours by the `category` of history entries (torch/utils/viz/MemoryViz.js). It has three
requirements that torch does not document: pickle protocol 4 or older with plain data only; the category "unknown" on at
least one entry if any entry has a category; and an entry for every allocation to be coloured, even one older than the
history. So blocks that are older than the history appear at its beginning as allocations.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.measure.allocations.categories import CATEGORIES, UNKNOWN
from workers.measure.allocations.ledger import Allocation, Entry, Ledger, rewind
from workers.measure.allocations.stacks import from_the_step_on
from workers.measure.paths import without_folders
from workers.measure.spans import merged

PROTOCOL = 4
"""The newest pickle protocol that the viewer reads."""
BEFORE = "before the history"
"""Phase of the allocations that are older than the history."""
ALLOCATED = "active_allocated"
UNKNOWN_NAME = CATEGORIES[UNKNOWN]
GAP = 1 << 20
"""Addresses that are further apart than this lie in different segments of a snapshot that has none of its own."""
Snapshot = dict[str, Any]


def blocks_of(snapshot: Snapshot, device_index: int) -> dict[int, Allocation]:
    """Return a device's allocated blocks in a snapshot, by address."""
    blocks: dict[int, Allocation] = {}
    for segment in snapshot["segments"]:
        if segment.get("device", device_index) != device_index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == ALLOCATED:
                size = block.get("requested_size", block["size"])
                blocks[address] = Allocation(address, size, None, block.get("frames", ()))
            address += block["size"]
    return blocks


def reserved_in(snapshot: Snapshot, device_index: int) -> int:
    """Return the bytes that the allocator holds of a device's memory."""
    return sum(one["total_size"] for one in snapshot["segments"] if one.get("device", device_index) == device_index)


def annotated(
    snapshot: Snapshot, device_index: int, ledger: Ledger, *, phase: str = "", lost: bool = False
) -> Snapshot:
    """Return a snapshot, in torch's format, with categories and phases on its entries and blocks; the given one is not
    changed. Histories of other devices than this one are left out. `ledger`: it has followed the history, or a longer
    one that ends with it. `phase`: what has just ended. `lost`: whether the history's beginning is missing."""
    trace: list[Entry] = snapshot["device_traces"][device_index]
    begin, alive = len(ledger.phases) - len(trace), ledger.alive
    kinds, stages = ledger.categories[begin:], ledger.phases[begin:]
    head = _older_allocations(rewind(blocks_of(snapshot, device_index), trace), trace, kinds, alive)
    entries = [
        {"frames": [], **entry, "category": CATEGORIES[kind], "user_metadata": stage}
        for entry, kind, stage in zip(trace, kinds, stages, strict=True)
    ]
    if not any(entry["category"] == UNKNOWN_NAME for entry in head + entries):
        # An entry without effect, which gives the viewer the category "unknown" that it requires.
        last_us, stage = trace[-1].get("time_us", 0) if trace else 0, ledger.phases[-1] if ledger.phases else BEFORE
        what: Entry = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": last_us, "frames": []}
        entries.append({**what, "category": UNKNOWN_NAME, "user_metadata": stage})
    traces: list[list[Entry]] = [[] for _ in snapshot["device_traces"]]
    traces[device_index] = head + entries
    return {
        **snapshot,
        "segments": [_categorised(segment, alive) for segment in snapshot["segments"]],
        "device_traces": traces,
        "external_annotations": _phase_marks(entries, device_index),
        "flopwatch": {
            "phase": phase,
            "history_lost": lost,
            "categories": list(CATEGORIES),
            "entries_before_the_history": len(head),
        },
    }


def _older_allocations(
    older: Mapping[int, Allocation], trace: Sequence[Entry], kinds: Sequence[int], alive: Mapping[int, Allocation]
) -> list[Entry]:
    """Return an allocation for each block that is older than the history, the lowest address first."""
    category = {address: one.category for address, one in alive.items()}
    # Backwards, so that the first release of an address, which is the older block's, sets the category last.
    for entry, kind in zip(reversed(trace), reversed(kinds), strict=True):
        if entry["action"] == "free_requested":
            category[entry["addr"]] = kind
    time_us = trace[0].get("time_us", 0) if trace else 0
    return [
        {
            "action": "alloc",
            "addr": address,
            "size": one.size,
            "stream": 0,
            "time_us": time_us,
            "frames": list(alive[address].frames) if address in alive and not one.frames else list(one.frames),
            "category": CATEGORIES[category.get(address, UNKNOWN)],
            "user_metadata": BEFORE,
        }
        for address, one in sorted(older.items())
    ]


def _categorised(segment: Mapping[str, Any], alive: Mapping[int, Allocation]) -> dict[str, Any]:
    blocks = []
    address = segment["address"]
    for block in segment["blocks"]:
        owner = alive.get(address)
        known = block["state"] == ALLOCATED and owner is not None
        blocks.append({**block, "category": CATEGORIES[owner.category]} if known and owner else block)
        address += block["size"]
    return {**segment, "blocks": blocks}


def _phase_marks(entries: Sequence[Entry], device_index: int) -> list[dict[str, Any]]:
    """Return the beginning and the end of each phase, in the format of a `record_function` in torch's snapshots."""
    marks = []
    for number, entry in enumerate(entries):
        name, time_us = entry["user_metadata"], entry.get("time_us", 0)
        if number == 0 or entries[number - 1]["user_metadata"] != name:
            marks.append({"name": name, "stage": "START", "device": device_index, "time_us": time_us})
        if number + 1 == len(entries) or entries[number + 1]["user_metadata"] != name:
            marks.append({"name": name, "stage": "END", "device": device_index, "time_us": time_us})
    return marks


def from_history(trace: Sequence[Entry], alive: Mapping[int, Allocation]) -> Snapshot:
    """Make a snapshot for an allocator that has no segments of its own, such as that of a CPU.

    Its segments are the ranges of addresses that the history touches, so that the viewer finds each block in one.
    """
    older = rewind(alive, trace)
    ranges = [(one.address, one.address + one.size) for one in (*alive.values(), *older.values())]
    ranges += [(entry["addr"], entry["addr"] + entry["size"]) for entry in trace if entry["action"] == "alloc"]
    living = sorted(alive.values(), key=lambda one: one.address)
    segments = []
    position = 0
    for begin, end in merged(ranges, GAP):
        inside = []
        while position < len(living) and living[position].address < end:
            inside.append(living[position])
            position += 1
        segments.append(_segment(begin, end, inside))
    return {"segments": segments, "device_traces": [list(trace)], "allocator_settings": {}}


def _segment(begin: int, end: int, living: Iterable[Allocation]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    address = begin
    for one in living:
        if one.address > address:
            blocks.append(_unused(address, one.address - address))
        blocks.append(
            {
                "address": one.address,
                "size": one.size,
                "requested_size": one.size,
                "state": ALLOCATED,
                "frames": list(one.frames),
            }
        )
        address = one.address + one.size
    if address < end:
        blocks.append(_unused(address, end - address))
    allocated = sum(block["size"] for block in blocks if block["state"] == ALLOCATED)
    return {
        "device": 0,
        "address": begin,
        "total_size": end - begin,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),  # of the common pool
        "frames": [],
        "blocks": blocks,
    }


def _unused(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def write(snapshot: Snapshot, path: Path) -> int:
    """Write a snapshot for the viewer, equal stacks and texts once. Returns the file's size in bytes.

    Stacks begin with the step, and file names lack the host's folders.
    """
    path.write_bytes(pickle.dumps(Interned().of(snapshot), protocol=PROTOCOL))
    return path.stat().st_size


class Interned:
    """Replaces equal parts by one object, which pickle then writes once. A stack is most of an entry's size."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._by_identity: dict[int, tuple[Any, Any]] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as plain data with shortened stacks. Equal stacks, frames and texts are the same
        objects."""
        return {self._text(key): self._value(value) for key, value in snapshot.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {
                self._text(key): self._stack(one) if key == "frames" else self._value(one) for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._value(one) for one in value]
        if isinstance(value, tuple):  # ids of pools, which programs use as keys
            return tuple(self._value(one) for one in value)
        return value

    def _text(self, text: str) -> str:
        known: str = self._known.setdefault(text, text)
        return known

    def _stack(self, frames: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        shared = list(from_the_step_on([self._frame(frame) for frame in frames]))
        key = tuple(map(id, shared))
        known: list[dict[str, Any]] = self._known.setdefault(key, shared)
        return known

    def _frame(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        # Torch gives equal frames as one object. The second value keeps it alive, so that its `id` is not used again.
        known = self._by_identity.get(id(frame))
        if known is None:
            named = {**frame, "filename": without_folders(frame["filename"])}
            key = (named["filename"], named["line"], named["name"])
            shared = self._known.setdefault(key, self._value(named))
            known = self._by_identity[id(frame)] = (shared, frame)
        interned: dict[str, Any] = known[0]
        return interned
