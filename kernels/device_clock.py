"""Device time of one call on a GPU, with a cold L2 cache and without the host's launch overhead.

A kernel that runs for 5 µs takes the host 30 to 100 µs to issue: events around the call would time the host. So the
call is enqueued behind work that keeps the device busy for longer than the host needs: the flush of the L2 cache, and a
delay. The clock checks that the delay sufficed: after the host has issued the call, the event before it must still be
pending. Otherwise the clock drops the sample and repeats it behind a longer delay.

No delay suffices for a call that itself waits for the device (`.item()`, a copy to the host), or that makes more than
about a thousand launches, the length of the driver's queue. After some tries the clock times such calls without a
delay: their times then include the time that the device waits for the host.

Two consecutive events are some time apart, and a kernel between them starts later than the first: 2.2 µs in all on an
H200. The clock measures this overhead around an empty kernel, without the kernel's own time, and subtracts it from
every sample.

Nothing here may import other packages of this project but the two files of clocks: tuning and measuring both use it.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .clock import now_s
from .device_events import Event, spin, synchronize

FLUSHED_CACHE_SIZES = 4
"""Size of the buffer that flushes the cache, as a multiple of the L2 cache, which does not replace lines in order."""
DELAY_FACTOR = 2.0
"""Ratio of the delay to the host's usual time for the call."""
MAX_DELAY_S = 0.1
FIRST_DELAY_S = 2e-3
"""Delay before a call's first lap, whose host time is unknown: twice the longest host time seen for one attention call,
forward and backward (1.1 ms)."""
TRIES = 6
"""Consecutive samples that may fail, each behind twice the delay of the previous one."""
REMEMBERED_CALLS = 15
CALIBRATION_CYCLES = 2_000_000
EMPTY_KERNEL_MS = 0.6e-3
"""Time of an empty kernel by CUPTI on an H200: one thread that spins for 0 cycles takes 0.58 µs, a fill of 4 KiB 0.70.
"""
EMPTY_KERNELS = 20
EMPTY_KERNEL_DELAY_S = 1e-4
RESOLUTION_MS = 32e-6
"""Resolution of event times, as seen on an H200; no call takes less."""

Workload = Callable[[], object]


@dataclass(frozen=True)
class Lap:
    """One timed call."""

    device_ms: float
    """Time from the device's start on the call to its end."""
    host_us: float
    """Time in which the host issued the call."""
    hidden: bool
    """True if the host had issued all of the call before the device started on it. If not, `device_ms` may include
    waiting."""


def nothing() -> None:
    """Do nothing: a call that needs no preparation."""


def host_lap_ms(work: Workload, prepare: Workload = nothing, clock: Callable[[], float] = now_s) -> float:
    """Return the wall time in ms of one call of `work` after an untimed `prepare`, for work on the CPU."""
    prepare()
    start = clock()
    work()
    return 1e3 * (clock() - start)


class DeviceClock:
    """Times calls on the current stream, one at a time. Holds the buffer that flushes the cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(FLUSHED_CACHE_SIZES * cache_bytes, dtype=torch.uint8, device=device)
        self._start, self._end = Event(), Event()
        self._cycles_per_s = self._calibrate()
        self.overhead_ms = self._measure_overhead()
        """Time that events add to the work between them."""
        self.forget()

    def forget(self) -> None:
        """Forget the host times of former laps: call it before timing another operation."""
        self._issued_s: deque[float] = deque(maxlen=REMEMBERED_CALLS)
        self._waits_inside = False

    def lap(self, work: Workload, prepare: Workload = nothing) -> Lap:
        """Time one call of `work`, after an untimed `prepare`.

        The first call after `forget` is never repeated, since callers may want the very first call of a function. It
        is behind FIRST_DELAY_S, so it is hidden unless the host takes longer. Later samples that are not hidden are
        repeated, with `prepare`.
        """
        if self._waits_inside:
            return self._timed_call(work, prepare, None)
        if not self._issued_s:
            return self._timed_call(work, prepare, FIRST_DELAY_S)
        delay_s = DELAY_FACTOR * statistics.median_low(self._issued_s)
        for _ in range(TRIES):
            lap = self._timed_call(work, prepare, min(delay_s, MAX_DELAY_S))
            if lap.hidden:
                return lap
            delay_s *= 2
        self._waits_inside = True
        self._issued_s.clear()
        return self._timed_call(work, prepare, None)

    def lap_together(self, work: Workload, prepare: Workload, align: Workload) -> Lap:
        """Time one call that several processes make together; it is not repeated, since they would have to agree.

        The call is behind a delay and then `align`, in which the devices wait for each other, so that all of them start
        the call at about the same time. The cache is not flushed. `hidden` may be False.
        """
        prepare()
        usual_s = statistics.median_low(self._issued_s) if self._issued_s else FIRST_DELAY_S / DELAY_FACTOR
        self._delay(min(DELAY_FACTOR * usual_s, MAX_DELAY_S))
        begun = now_s()
        align()
        aligned_s = now_s() - begun
        lap = self._between_events(work)
        self._issued_s.append(aligned_s + 1e-6 * lap.host_us)
        return Lap(max(lap.device_ms - self.overhead_ms, RESOLUTION_MS), lap.host_us, lap.hidden)

    def _timed_call(self, work: Workload, prepare: Workload, delay_s: float | None) -> Lap:
        prepare()
        self._buffer.zero_()
        if delay_s is None:
            synchronize(self._device)
        else:
            self._delay(delay_s)
        lap = self._between_events(work)
        self._issued_s.append(1e-6 * lap.host_us)
        return Lap(max(lap.device_ms - self.overhead_ms, RESOLUTION_MS), lap.host_us, lap.hidden)

    def _between_events(self, work: Workload) -> Lap:
        self._start.record()
        begun = now_s()
        work()
        issued_s = now_s() - begun
        self._end.record()
        hidden = not self._start.query()
        self._end.synchronize()
        return Lap(self._start.milliseconds_to(self._end), 1e6 * issued_s, hidden)

    def _measure_overhead(self) -> float:
        """Return the time in ms that events show around an empty kernel, less the kernel's own."""
        times = []
        for _ in range(EMPTY_KERNELS):
            self._delay(EMPTY_KERNEL_DELAY_S)
            times.append(self._between_events(lambda: spin(0)).device_ms)
        return max(0.0, statistics.median(times) - EMPTY_KERNEL_MS)

    def _delay(self, seconds: float) -> None:
        spin(int(seconds * self._cycles_per_s))

    def _calibrate(self) -> float:
        """Return the device clock's cycles per second; approximate, since the clock changes with load and heat."""
        for _ in range(2):  # the first loads the kernel
            self._start.record()
            spin(CALIBRATION_CYCLES)
            self._end.record()
            self._end.synchronize()
        return CALIBRATION_CYCLES / (1e-3 * self._start.milliseconds_to(self._end))
