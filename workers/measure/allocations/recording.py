"""Records the allocations of steps: the history is cut into stretches by marks, one at the end of each phase."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from workers.measure.allocations.categories import Owners
from workers.measure.allocations.free import Free
from workers.measure.allocations.ledger import Allocation, Stretch
from workers.measure.allocations.snapshot import Snapshot
from workers.measure.timing import Observer

if TYPE_CHECKING:
    from workers.measure.allocations.cpu import CpuRecording
    from workers.measure.allocations.cuda import CudaRecording

    Recording: TypeAlias = CudaRecording | CpuRecording

MAX_POINTS = 1000
"""Most points of the timeline of a stretch."""
PREPARATION = "preparation"
"""The stretch between two steps, in which the batch is made and gradients may be dropped."""
AFTER = "after the step"
"""The stretch after a watched step."""


@dataclass(frozen=True)
class Counters:
    """An allocator's own counters over a stretch, in bytes."""

    allocated_peak: int
    allocated_end: int
    requested_peak: int
    reserved_peak: int
    reserved_end: int


@dataclass(frozen=True)
class RecordedStretch:
    """A stretch with its counters and its snapshot."""

    stretch: Stretch
    counters: Counters | None = None
    """The allocator's counters; None if it has none, as on a CPU."""
    snapshot: Snapshot | None = None
    """The annotated snapshot of the stretch's end; None if it was not requested."""
    history: int = 0
    """Number of entries of the history in the snapshot."""
    history_lost: bool = False
    """True if the history is longer, so that its oldest entries are missing in the snapshot."""
    alive: Sequence[Allocation] | None = None
    """The allocations alive at the stretch's end; None if they were not requested."""
    free: Free | None = None
    """The free memory that the allocator held at the peak; None if it reports no segments."""


class PhaseMarks(Observer):
    """An observer of steps that marks the ends of phases in a recording. `owners`: returns the present owners of
    storages. `without`: phases whose snapshots are never kept."""

    def __init__(self, recording: Recording, owners: Callable[[], Owners], without: Collection[str] = ()) -> None:
        self.keep = False
        """Whether the snapshots of the phases are kept."""
        self.watch = False
        """Whether the allocations alive after a step are kept, and with `keep_after` a snapshot of that moment."""
        self.keep_after = False
        self._without = without
        self._recording = recording
        self._owners = owners

    def step_begins(self) -> None:
        self._recording.mark(PREPARATION, self._owners())

    def phase_ends(self, name: str) -> None:
        self._recording.mark(name, self._owners(), keep=self.keep and name not in self._without)

    def step_ends(self) -> None:
        """Mark what is left after a watched step, without what only waits for Python's collector."""
        if self.watch:
            gc.collect()
            self._recording.mark(AFTER, self._owners(), keep=self.keep_after, alive=True)
