"""Device time of one call on a GPU, with a cold L2 cache and with the host out of the way.

A kernel that runs for 5 µs takes the host 30 to 100 µs to issue: events around the call would time the host. So the
call is enqueued behind work that keeps the device busy for longer than the host needs: the flush of the L2 cache, and a
delay. Whether that held is not assumed but seen: after the host has issued the call, the event before it must still be
pending. If it is not, the sample is dropped and taken again behind a longer delay.

A call that waits for the device inside (`.item()`, a copy to the host) can never be issued in time, nor can one of more
than about a thousand launches, which the driver's queue does not hold. After some tries such calls are timed without
a delay: their times then hold whatever the device waited for the host.

Two events in a row are some time apart by themselves, and a kernel between them starts later than the first: 2.2 µs in
all on an H200. This is measured around an empty kernel, less what such a kernel itself takes, and taken off every
sample.

Nothing here may import other packages of this project: tuning and measuring both use it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSHED_CACHE_SIZES = 4
"""Size of the buffer that is overwritten before a call, in L2 caches: caches do not replace their lines in order."""
DELAY_FACTOR = 2.0
"""The delay over the host's usual time for the call."""
MAX_DELAY_S = 0.1
FIRST_DELAY_S = 2e-3
"""Before a call's first lap, when nobody knows how long the host takes for it: twice the longest that was seen for one
attention call, forward with backward (1.1 ms)."""
TRIES = 6
"""Samples in a row that may miss, each behind twice the delay of the one before."""
REMEMBERED_CALLS = 15
CALIBRATION_CYCLES = 2_000_000
EMPTY_KERNEL_MS = 0.6e-3
"""A kernel that does nothing, as CUPTI times it on an H200 (0.58 µs one thread that spins for 0 cycles, 0.70 µs a fill
of 4 KiB)."""
EMPTY_KERNELS = 20
EMPTY_KERNEL_DELAY_S = 1e-4
RESOLUTION_MS = 32e-6
"""Of event times, as seen on an H200; no call takes less."""

Work = Callable[[], None]


@dataclass(frozen=True)
class Lap:
    """One timed call."""

    device_ms: float
    """Time from the device's start on the call to its end."""
    host_us: float
    """Time in which the host issued the call."""
    hidden: bool
    """Whether the host had issued all of it before the device started on it. If not, `device_ms` may hold waiting."""


def nothing() -> None:
    """Nothing to prepare."""


class DeviceClock:
    """Times calls on the current stream, one at a time. Holds the buffer that is overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(FLUSHED_CACHE_SIZES * cache_bytes, dtype=torch.uint8, device=device)
        self._start, self._end = (
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )
        self._cycles_per_s = self._calibrate()
        self.overhead_ms = self._measure_overhead()
        """What events add to the time of what is between them."""
        self.forget()

    def forget(self) -> None:
        """What is timed next is another call."""
        self._issued_s: deque[float] = deque(maxlen=REMEMBERED_CALLS)
        self._waits_inside = False

    def lap(self, work: Work, prepare: Work = nothing) -> Lap:
        """Time one call of `work`, after an untimed `prepare`.

        The first call after `forget` is never repeated, since it may be asked for as the very first: it is behind
        FIRST_DELAY_S, and hidden unless the host takes longer. Of the others, samples that are not hidden are repeated,
        `prepare` included.
        """
        if self._waits_inside:
            return self._take(work, prepare, None)
        if not self._issued_s:
            return self._take(work, prepare, FIRST_DELAY_S)
        delay_s = DELAY_FACTOR * statistics.median_low(self._issued_s)
        for _ in range(TRIES):
            lap = self._take(work, prepare, min(delay_s, MAX_DELAY_S))
            if lap.hidden:
                return lap
            delay_s *= 2
        self._waits_inside = True
        self._issued_s.clear()
        return self._take(work, prepare, None)

    def _take(self, work: Work, prepare: Work, delay_s: float | None) -> Lap:
        prepare()
        self._buffer.zero_()
        if delay_s is None:
            torch.cuda.synchronize(self._device)
        else:
            self._delay(delay_s)
        lap = self._between_events(work)
        self._issued_s.append(1e-6 * lap.host_us)
        return Lap(max(lap.device_ms - self.overhead_ms, RESOLUTION_MS), lap.host_us, lap.hidden)

    def _between_events(self, work: Work) -> Lap:
        self._start.record()
        begun = time.perf_counter()
        work()
        issued_s = time.perf_counter() - begun
        self._end.record()
        hidden = not self._start.query()  # type: ignore[no-untyped-call]
        self._end.synchronize()
        return Lap(float(self._start.elapsed_time(self._end)), 1e6 * issued_s, hidden)

    def _measure_overhead(self) -> float:
        """Time in ms that events show around an empty kernel, less the kernel's own."""
        times = []
        for _ in range(EMPTY_KERNELS):
            self._delay(EMPTY_KERNEL_DELAY_S)
            times.append(self._between_events(lambda: torch.cuda._sleep(0)).device_ms)  # type: ignore[no-untyped-call]
        return max(0.0, statistics.median(times) - EMPTY_KERNEL_MS)

    def _delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))  # type: ignore[no-untyped-call]

    def _calibrate(self) -> float:
        """Cycles of the device's clock in a second, roughly: it changes with load and heat."""
        for _ in range(2):  # the first loads the kernel
            self._start.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            self._end.record()
            self._end.synchronize()
        return CALIBRATION_CYCLES / (1e-3 * float(self._start.elapsed_time(self._end)))
