"""The device's idle time, gaps and launches in each profiled step."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.measure.busy import Span, covered_ns
from workers.measure.profiling.attribution import Interval, RecordedWork


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
        spans = [Span(one.begin_ns, one.end_ns, one.name) for one in work if one.step == step.step]
        end = max([step.end_ns, *(span.end_ns for span in spans)])
        busy = covered_ns(spans)
        idle = end - step.begin_ns - busy
        uses.append(StepUse(1e-6 * busy, 1e-6 * idle, 1e-6 * largest_gap_ns(spans, step.begin_ns, end), len(spans)))
    return uses


def largest_gap_ns(spans: Sequence[Span], begin_ns: int, end_ns: int) -> int:
    """Return the longest time between a beginning and an end in which no span runs."""
    reached, largest = begin_ns, 0
    for span in sorted(spans):
        largest = max(largest, span.begin_ns - reached)
        reached = max(reached, span.end_ns)
    return max(largest, end_ns - reached)
