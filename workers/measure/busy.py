"""How long a GPU is busy in a step, as CUPTI tells it through torch's profiler.

Events on a stream cannot tell: between two of them a device may work or wait for the host. The driver's queue is too
short for a whole step to be enqueued behind a delay. So some steps more are run under the profiler, which notes when
each kernel, copy and fill began and ended. The host is slower under it, the kernels are not: their time together is
compared with the wall time of the steps that were measured without it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from kernels.device_clock import Work, nothing
from workers.measure.memory import gist

STEPS = 2
DEVICE_GAP_US = 1.0
"""Between one kernel and the next a device needs some time of its own, however far ahead the host is: 1 µs on an H200,
0.3 to 0.6 µs in a CUDA graph. What goes beyond it is waiting."""
NOTHING_SEEN = "the profiler saw no kernel: another profiler may hold CUPTI"


class Span(NamedTuple):
    """One kernel, copy or fill."""

    begin_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True)
class Busy:
    """A device's work in one step."""

    busy_ms: float
    """Time in which at least one kernel, copy or fill ran."""
    launches: int
    """Number of these."""


def measure_busy(run: Work, prepare: Work = nothing, steps: int = STEPS) -> Busy | str:
    """The device's work in `run`, after a `prepare` that is left out, or why it cannot be told; the median of some.

    Another profiler (nsys, ncu) that holds CUPTI leaves none for us.
    """
    found: list[Busy] = []
    try:
        for _ in range(steps):
            prepare()
            spans = device_work(run)
            if not spans:
                return NOTHING_SEEN
            found.append(Busy(1e-6 * covered_ns(spans), len(spans)))
    except RuntimeError as error:
        return f"the profiler failed: {gist(error)}"
    return Busy(statistics.median(one.busy_ms for one in found), found[-1].launches)


def device_work(run: Work) -> list[Span]:
    """What the device did in `run`, in the order it began; ranges that people named are no work."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's, on how it is used over several steps
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
    results: Any = profiler.profiler
    events = (event for event in results.kineto_results.events() if event.device_type() == DeviceType.CUDA)
    return sorted(
        Span(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if not event.is_user_annotation()
    )


def covered_ns(spans: Iterable[Span]) -> int:
    """Length of the union of spans: what runs side by side counts once."""
    total, reached = 0, 0
    for span in sorted(spans):
        if span.end_ns > reached:
            total += span.end_ns - max(span.begin_ns, reached)
            reached = span.end_ns
    return total
