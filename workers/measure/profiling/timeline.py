"""The device's idle time, gaps and launches in each profiled step."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.measure.profiling.attribution import Interval, RecordedWork
from workers.measure.spans import merged, total_ms, without


@dataclass(frozen=True)
class StepUse:
    """A device's use in one profiled step. The profiler slows down the host, and so it lengthens the gaps."""

    busy_ms: float
    """Time during which at least one kernel, copy or fill ran."""
    idle_ms: float
    """Time of the step in which none ran."""
    largest_gap_ms: float
    launches: int
    """Number of kernels, copies and fills."""


def step_uses(work: Sequence[RecordedWork], steps: Sequence[Interval]) -> list[StepUse]:
    """Return the device's use in each step, from the step's beginning until both host and device have finished it.
    `steps`: the steps as the host ran their phases."""
    uses = []
    for step in steps:
        spans = [(one.begin_ns, one.end_ns) for one in work if one.step == step.step]
        busy, end = merged(spans), max([step.end_ns, *(end for _, end in spans)])
        gaps = without([(step.begin_ns, end)], busy)
        largest_ms = max((total_ms([gap]) for gap in gaps), default=0.0)
        uses.append(StepUse(total_ms(busy), total_ms(gaps), largest_ms, len(spans)))
    return uses
