"""The free memory that an allocator held at an earlier moment: its segments less the blocks that were in use."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workers.measure.allocations.ledger import Allocation, Entry
from workers.measure.allocations.snapshot import Snapshot

ROUNDED_TO = 512
"""The allocator rounds the sizes of blocks up to a multiple of these bytes."""
Range = tuple[int, int]


class Free(NamedTuple):
    """Free memory that an allocator holds, in bytes."""

    largest: int
    stuck: int
    """In segments that are partly in use, which the allocator cannot give back where memory runs out."""


def free_at(snapshot: Snapshot, device_index: int, since: Sequence[Entry], used: Iterable[Allocation]) -> Free:
    """Return the free memory at an earlier moment. `snapshot`: a later snapshot. `since`: the history between that
    moment and the snapshot. `used`: the allocations alive at that moment."""
    blocks = sorted((one.address, one.address + -(-one.size // ROUNDED_TO) * ROUNDED_TO) for one in used)
    largest, stuck, position = 0, 0, 0
    for begin, end in _segments(snapshot, device_index, since):
        while position < len(blocks) and blocks[position][0] < begin:
            position += 1
        free, free_from = [], begin
        while position < len(blocks) and blocks[position][0] < end:
            free.append(blocks[position][0] - free_from)
            free_from = blocks[position][1]
            position += 1
        stuck += sum(free) + end - free_from if free else 0
        largest = max(largest, *free, end - free_from)
    return Free(largest, stuck)


def _segments(snapshot: Snapshot, device_index: int, since: Sequence[Entry]) -> list[Range]:
    """Return the segments at the earlier moment, by address. Expandable ones grow and shrink at their ends."""
    segments = {
        one["address"]: one["address"] + one["total_size"]
        for one in snapshot["segments"]
        if one.get("device", device_index) == device_index
    }
    for entry in reversed(since):
        begin = entry.get("addr", 0)
        end = begin + entry.get("size", 0)
        match entry["action"]:
            case "segment_alloc":
                segments.pop(begin, None)
            case "segment_free":
                segments[begin] = end
            case "segment_map":
                _unmap(segments, begin, end)
            case "segment_unmap":
                _map(segments, begin, end)
    return sorted(segments.items())


def _unmap(segments: dict[int, int], begin: int, end: int) -> None:
    for start, stop in list(segments.items()):
        if start <= begin and end <= stop:
            del segments[start]
            if start < begin:
                segments[start] = begin
            if end < stop:
                segments[end] = stop


def _map(segments: dict[int, int], begin: int, end: int) -> None:
    end = segments.pop(end, end)
    before = next((start for start, stop in segments.items() if stop == begin), begin)
    segments[before] = end
