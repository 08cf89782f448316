"""The one stopwatch for single calls: on a GPU by events on the device, on a CPU by the host's clock.

`kernels.device_clock` separates a call's device time from the host's, and its docstring explains how.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.clock import now_s
from kernels.device_clock import DeviceClock, Workload, host_lap_ms, nothing
from workers.measure.warmup import WarmUp


@dataclass(frozen=True)
class Timing:
    """A stopwatch's results for one call."""

    samples: array[float]
    """Milliseconds per call: the device's time on a GPU, wall time on a CPU."""
    host_us: array[float] | None
    """Microseconds in which the host issued each call; None on a CPU, where the host does the work itself."""
    warmup: int
    """Calls made before measuring began."""
    steady: bool | None
    """True if times were steady when measuring began; None if this was not judged, because the caller fixed the number
    of warm-up calls or because calls are too slow."""
    host_bound: bool
    """True if the host takes longer to issue the call than the device takes for its work (medians). In a program that
    makes such calls one after the other, the device then waits for the host."""
    exposed: bool = False
    """True if most samples include the device's waiting: the call itself waits for the device, or makes more launches
    than the driver's queue holds. If False, the median of `samples` is the device's own time even if `host_bound`."""
    too_slow: bool = False
    """True if calls are too slow to judge `steady`."""
    hidden: float | None = None
    """As `WarmUp.hidden`."""


class HostStopwatch:
    """The stopwatch of one operation for the CPU, where a call returns when its work is done."""

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self._clock = clock

    def time(
        self,
        work: Workload,
        *,
        prepare: Workload = nothing,
        measuring: Workload = nothing,
        warmup: int | None,
        calls: int,
    ) -> Timing:
        """Time `calls` calls of `work`, each after an untimed `prepare`.

        Args:
            prepare: Runs before each call, outside its time; also before calls that are repeated.
            measuring: Called once, when the warm-up is over and samples begin.
            warmup: Exact number of calls before the first sample; None: until times are steady.
            calls: Number of samples, 1 or more.
        """
        warming = WarmUp(warmup, clock=self._clock)
        while not warming.over:
            warming.add(self._lap(work, prepare))
        measuring()
        samples = array("d", (self._lap(work, prepare) for _ in range(calls)))
        return Timing(samples, None, warming.calls, warming.steady, False, False, warming.too_slow, warming.hidden)

    def _lap(self, work: Workload, prepare: Workload) -> float:
        return host_lap_ms(work, prepare, self._clock)


class CudaStopwatch:
    """The same for a GPU, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)

    def time(
        self,
        work: Workload,
        *,
        prepare: Workload = nothing,
        measuring: Workload = nothing,
        warmup: int | None,
        calls: int,
    ) -> Timing:
        self._clock.forget()
        warming = WarmUp(warmup)
        while not warming.over:
            warming.add(self._clock.lap(work, prepare).device_ms)
        measuring()
        laps = [self._clock.lap(work, prepare) for _ in range(calls)]
        samples = array("d", (lap.device_ms for lap in laps))
        host_us = array("d", (lap.host_us for lap in laps))
        host_bound = statistics.median(host_us) > 1e3 * statistics.median(samples)
        exposed = 2 * sum(lap.hidden for lap in laps) < calls
        told = warming.steady, host_bound, exposed, warming.too_slow, warming.hidden
        return Timing(samples, host_us, warming.calls, *told)


Stopwatch = CudaStopwatch | HostStopwatch


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
