"""How long a GPU is busy in a step, as CUPTI tells it through torch's profiler.

Events on a stream cannot tell: between two of them a device may work or wait for the host. The driver's queue is too
short for a whole step to be enqueued behind a delay. So some steps more are run under the profiler, which notes when
each kernel, copy and fill began and ended. The host is slower under it, the kernels are not: their time together is
compared with the wall time of the steps that were measured without it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from workers.measure.memory import gist

STEPS = 2
DEVICE_GAP_US = 1.0
"""Between one kernel and the next a device needs some time of its own, however far ahead the host is: 1 µs on an H200,
0.3 to 0.6 µs in a CUDA graph. What goes beyond it is waiting."""


@dataclass(frozen=True)
class Busy:
    """A device's work in one step."""

    busy_ms: float
    """Time in which at least one kernel, copy or fill ran."""
    launches: int
    """Number of these."""


def measure_busy(run: Callable[[], None], steps: int = STEPS) -> Busy | str:
    """The device's work in `run`, which is one whole step with its preparation left out, or why it cannot be told.

    The median of some calls. Another profiler (nsys, ncu) that holds CUPTI leaves none for us.
    """
    try:
        return _median(run, steps)
    except RuntimeError as error:
        return f"the profiler failed: {gist(error)}"


def _median(run: Callable[[], None], steps: int) -> Busy | str:
    torch.cuda.synchronize()
    found: list[Busy] = []
    for _ in range(steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's, on how it is used over several steps
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                run()
                torch.cuda.synchronize()
        results: Any = profiler.profiler
        spans = list(device_spans(results.kineto_results.events()))
        if not spans:
            return "the profiler saw no kernel: another profiler may hold CUPTI"
        found.append(Busy(1e-6 * covered_ns(spans), len(spans)))
    return Busy(statistics.median(one.busy_ms for one in found), found[-1].launches)


def device_spans(events: Iterable[Any]) -> Iterable[tuple[int, int]]:
    """Begin and end in ns of what ran on the device; ranges that people named are no work."""
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            yield event.start_ns(), event.start_ns() + event.duration_ns()


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of spans: what runs side by side counts once."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
