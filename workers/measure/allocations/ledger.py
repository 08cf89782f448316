"""Follows the history of an allocator, phase by phase: the living allocations, their categories, and the use of memory
over time.

It reads history entries as torch's snapshots have them: dictionaries with `action` ("alloc", "free_requested",
"free_completed", "segment_alloc", …), `addr`, `size` and `frames`. It needs no device.

Sizes are the requested bytes. Allocators hand out a little more: torch's rounds up to 512 bytes, and leaves up to 1 MiB
unused at the end of a large block.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.measure.allocations.categories import ACTIVATION, CATEGORIES, FORWARD, TEMPORARY, UNKNOWN, Owners

Entry = dict[str, Any]
GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Actions that change what the allocator holds of the device's memory, with their signs."""

WORKSPACE = "cuBLAS workspace"
"""Name of the blocks that libraries keep for matrix products."""


@dataclass(slots=True, eq=False)
class Allocation:
    """A stretch of memory from its allocation to its release."""

    address: int
    size: int
    """In bytes."""
    made_in: str | None
    """The phase; None if it was there before the history."""
    frames: Sequence[Mapping[str, Any]] = ()
    """Stack of the allocation, the innermost frame first."""
    category: int = UNKNOWN
    """Index into CATEGORIES."""
    name: str | None = None
    """The tensor's, if it has one."""


@dataclass(frozen=True)
class Point:
    """Memory in use after one entry of the history."""

    entry: int
    """Number of the entry within its phase."""
    usage: tuple[int, ...]
    """Bytes of each category."""
    touched: Allocation | None = field(default=None, compare=False)
    """The allocation that the entry makes or releases; None at the stretch's beginning and end."""
    change: int = field(default=0, compare=False)
    """Bytes by which the entry changes the use."""

    @property
    def total(self) -> int:
        """Bytes in use."""
        return sum(self.usage)


@dataclass
class Stretch:
    """The allocations from one mark to the next: those of a phase of a step, or of its preparation."""

    phase: str
    entries: int
    """Length of its history."""
    start: Point
    peak: Point
    end: Point
    points: list[Point]
    """The use of memory over time, thinned out; peaks stay."""
    at_peak: list[Allocation]
    made: list[Allocation]
    lost: bool = False
    """True if the history is longer than the recorder keeps: its beginning, and perhaps its peak, are missing."""
    reserved_at_peak: int | None = None
    """Bytes that the allocator had reserved on the device at the peak; None if it does not report them."""


class Ledger:
    """The living allocations of one device. `alive`: the allocations alive when the history begins. `max_points`:
    points of the use over time that each stretch keeps."""

    def __init__(self, alive: Iterable[Allocation] = (), max_points: int = 1000) -> None:
        self.alive: dict[int, Allocation] = {one.address: one for one in alive}
        """By address."""
        self.categories: list[int] = []
        """The category of each entry of the history so far: that of the allocation it makes or releases."""
        self.phases: list[str] = []
        """The phase of each of these entries."""
        self._max_points = max_points

    def follow(
        self,
        phase: str,
        entries: Sequence[Entry],
        owners: Owners,
        *,
        blocks: Mapping[int, Allocation] | None = None,
        lost: bool = False,
        reserved: int | None = None,
    ) -> Stretch:
        """Process the history of a phase that has just ended.

        Args:
            phase: Its name; the same phase of different steps has the same name.
            owners: The owners of storages at its end.
            blocks: The allocator's own list of living blocks at its end, by address; needed if the history is `lost`.
            lost: Whether the beginning of the phase's history is missing.
            reserved: Bytes that the allocator has reserved at its end.
        """
        unseen = self._resume(phase, rewind(blocks, entries)) if lost and blocks is not None else []
        before = dict(self.alive)
        touched, made, missed = self._replay(phase, entries)
        made = unseen + made
        for one in missed:
            before[one.address] = one
        self._categorise(phase, made, owners)
        self.categories += [UNKNOWN if one is None else one.category for one in touched]
        self.phases += [phase] * len(entries)
        start, peak, end, points = self._measure(before.values(), entries, touched)
        return Stretch(
            phase,
            len(entries),
            start,
            peak,
            end,
            points,
            at_peak=_alive_at(before, entries, touched, peak.entry),
            made=made,
            lost=lost,
            reserved_at_peak=None if reserved is None else reserved - _growth(entries[peak.entry + 1 :]),
        )

    def _resume(self, phase: str, alive: Mapping[int, Allocation]) -> list[Allocation]:
        """Continue after a gap at the beginning of a phase. Returns the allocations made in the gap.

        Allocations with the same address and size as before the gap count as the same.
        """
        known, unseen = self.alive, []
        self.alive = {}
        for address, one in alive.items():
            former = known.get(address)
            if former is not None and former.size == one.size:
                self.alive[address] = former
            else:
                one.made_in = phase
                unseen.append(one)
                self.alive[address] = one
        return unseen

    def _replay(
        self, phase: str, entries: Sequence[Entry]
    ) -> tuple[list[Allocation | None], list[Allocation], list[Allocation]]:
        """Return the allocation of each entry, the allocations made here, and released ones that are older than the
        history."""
        touched: list[Allocation | None] = []
        made, missed = [], []
        released: dict[int, Allocation] = {}
        for entry in entries:
            one: Allocation | None = None
            action, address = entry["action"], entry.get("addr", 0)
            if action == "alloc":
                one = Allocation(address, entry["size"], phase, entry.get("frames", ()))
                self.alive[address] = one
                made.append(one)
            elif action == "free_requested":
                one = self.alive.pop(address, None)
                if one is None:
                    one = Allocation(address, entry["size"], None)
                    missed.append(one)
                released[address] = one
            elif action == "free_completed":
                one = released.pop(address, None)
            touched.append(one)
        return touched, made, missed

    def _categorise(self, phase: str, made: Sequence[Allocation], owners: Owners) -> None:
        """Set the categories of a phase's allocations and of owned ones, by the rule of `categories`."""
        for one in made:
            if self.alive.get(one.address) is not one:
                one.category = TEMPORARY
            elif phase == FORWARD:
                one.category = ACTIVATION
        for address, owner in owners.items():
            owned = self.alive.get(address)
            if owned is not None and owned.size >= owner.size:
                owned.category, owned.name = owner.category, owner.name

    def _measure(
        self, before: Iterable[Allocation], entries: Sequence[Entry], touched: Sequence[Allocation | None]
    ) -> tuple[Point, Point, Point, list[Point]]:
        """Return the use of memory at the start, at the peak, at the end, and over time."""
        usage = [0] * len(CATEGORIES)
        for one in before:
            usage[one.category] += one.size
        start = peak = Point(-1, tuple(usage))
        total = peak_total = sum(usage)
        curve = _Curve(start, len(entries), self._max_points)
        for number, (entry, touch) in enumerate(zip(entries, touched, strict=True)):
            if touch is None or entry["action"] == "free_completed":
                continue
            change = touch.size if entry["action"] == "alloc" else -touch.size
            usage[touch.category] += change
            total += change
            if total > peak_total:
                peak, peak_total = Point(number, tuple(usage)), total
            curve.add(Point(number, tuple(usage), touch, change), total)
        end = Point(len(entries) - 1, tuple(usage))
        return start, peak, end, curve.points(end)


class _Curve:
    """Thins a curve out to a number of points: the highest and the last one of each equal part of the history."""

    def __init__(self, start: Point, length: int, most: int) -> None:
        parts = max(1, (most - 2) // 2)
        self._part = max(1, -(-length // parts))
        self._kept = [start]
        self._number = 0
        self._highest: Point | None = None
        self._highest_total = 0
        self._last: Point | None = None

    def add(self, point: Point, total: int) -> None:
        """Add the use after an entry; `total` is the point's total."""
        if point.entry // self._part != self._number:
            self._close()
            self._number = point.entry // self._part
        if self._highest is None or total > self._highest_total:
            self._highest, self._highest_total = point, total
        self._last = point

    def _close(self) -> None:
        if self._highest is not None:
            self._kept.append(self._highest)
        if self._last is not None and self._last is not self._highest:
            self._kept.append(self._last)
        self._highest = self._last = None

    def points(self, end: Point) -> list[Point]:
        self._close()
        return self._kept if self._kept[-1].entry == end.entry else [*self._kept, end]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return about `most` points of a curve, with its first, its last and its highest ones."""
    curve = _Curve(points[0], points[-1].entry + 1, most)
    for point in points[1:]:
        curve.add(point, point.total)
    return curve.points(points[-1])


def rewind(blocks: Mapping[int, Allocation], entries: Sequence[Entry]) -> dict[int, Allocation]:
    """Return the allocations alive when a history began, computed from those alive at its end."""
    alive = dict(blocks)
    for entry in reversed(entries):
        if entry["action"] == "alloc":
            alive.pop(entry["addr"], None)
        elif entry["action"] == "free_requested":
            alive[entry["addr"]] = Allocation(entry["addr"], entry["size"], None)
    return alive


def _alive_at(
    before: Mapping[int, Allocation], entries: Sequence[Entry], touched: Sequence[Allocation | None], last: int
) -> list[Allocation]:
    """Return the allocations alive after entry `last`."""
    alive = dict(before)
    for number in range(last + 1):
        touch = touched[number]
        if touch is None:
            continue
        if entries[number]["action"] == "alloc":
            alive[touch.address] = touch
        elif entries[number]["action"] == "free_requested":
            alive.pop(touch.address, None)
    return list(alive.values())


def _growth(entries: Iterable[Entry]) -> int:
    """Return the bytes by which the allocator's reserved memory grows over a history."""
    return sum(GROWS.get(entry["action"], 0) * entry.get("size", 0) for entry in entries)
