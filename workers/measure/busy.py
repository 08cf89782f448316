"""Measures how long a GPU is busy in a step, with CUPTI through torch's profiler.

Events on a stream do not show this: between two of them a device may work or wait for the host. The driver's queue is
too short for a whole step to be enqueued behind a delay. So a few further steps run under the profiler, which records
when each kernel, copy and fill began and ended. The profiler slows down the host but not the kernels, so the sum of
their times is compared with the wall time of the steps that were measured without it.
"""

import statistics
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from kernels.device_clock import Workload, nothing
from kernels.device_events import synchronize
from workers.measure.memory import short_message
from workers.measure.spans import Span, merged, total_ms

STEPS = 2
DEVICE_GAP_US = 1.0
"""Time that a device needs between two kernels even if the host is far ahead: 1 µs on an H200, 0.3 to 0.6 µs in a CUDA
graph. The rest of a gap counts as waiting."""
NOTHING_SEEN = "the profiler saw no kernel: another profiler may hold CUPTI"


@dataclass(frozen=True)
class Busy:
    """A device's work in one step."""

    busy_ms: float
    """Time during which at least one kernel, copy or fill ran."""
    launches: int
    """Number of kernels, copies and fills."""


def measure_busy(run: Workload, prepare: Workload = nothing) -> Busy | str:
    """Return the device's work in one `run`, the median of STEPS runs, or the reason why it is unknown.

    `prepare` runs before each `run` and is not counted.

    It cannot be measured while another profiler (nsys, ncu) holds CUPTI.
    """
    measured: list[Busy] = []
    try:
        for _ in range(STEPS):
            prepare()
            spans = device_work(run)
            if not spans:
                return NOTHING_SEEN
            measured.append(Busy(total_ms(merged(spans)), len(spans)))
    except RuntimeError as error:
        return f"the profiler failed: {short_message(error)}"
    return Busy(statistics.median(one.busy_ms for one in measured), measured[-1].launches)


def device_work(run: Workload) -> list[Span]:
    """Return when the device's kernels, copies and fills in `run` ran, in order."""
    synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's warnings are about its use over several steps
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            synchronize()
    results: Any = profiler.profiler
    events = (event for event in results.kineto_results.events() if event.device_type() == DeviceType.CUDA)
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if not event.is_user_annotation()  # the range that an annotation names
    )
