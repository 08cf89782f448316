"""Device time of one call on a GPU, with a cold L2 cache and with the host out of the way.

A kernel that runs for 5 µs takes the host 30 to 100 µs to issue: events around the call would time the host. So the
call is enqueued behind work that keeps the device busy for longer than the host needs: the flush of the L2 cache, and a
delay. The clock checks that this held: after the host has issued the call, the event before it must still be pending.
If it is not, the clock drops the sample and takes it again behind a longer delay.

The host cannot issue a call in time that waits for the device inside (`.item()`, a copy to the host), nor one of more
than about a thousand launches, which the driver's queue does not hold. After some tries the clock times such calls
without a delay: their times then include the time that the device waited for the host.

Two events in a row are some time apart by themselves, and a kernel between them starts later than the first: 2.2 µs in
all on an H200. The clock measures this around an empty kernel, subtracts the kernel's own time, and takes the rest off
every sample.

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
"""Ratio of the delay to the host's usual time for the call."""
MAX_DELAY_S = 0.1
FIRST_DELAY_S = 2e-3
"""Before a call's first lap, when nobody knows how long the host takes for it: twice the longest that was seen for one
attention call, forward with backward (1.1 ms)."""
TRIES = 6
"""Samples in a row that may fail, each behind twice the delay of the one before."""
REMEMBERED_CALLS = 15
CALIBRATION_CYCLES = 2_000_000
EMPTY_KERNEL_MS = 0.6e-3
"""A kernel that does nothing, as CUPTI times it on an H200 (0.58 µs one thread that spins for 0 cycles, 0.70 µs a fill
of 4 KiB)."""
EMPTY_KERNELS = 20
EMPTY_KERNEL_DELAY_S = 1e-4
RESOLUTION_MS = 32e-6
"""Resolution of event times, as seen on an H200; no call takes less."""

Work = Callable[[], None]


@dataclass(frozen=True)
class Lap:
    """One timed call."""

    device_ms: float
    """Time from the device's start on the call to its end."""
    host_us: float
    """Time in which the host issued the call."""
    hidden: bool
    """True if the host had issued all of the call before the device started on it. If not, `device_ms` may include
    waiting.
    """


def nothing() -> None:
    """Do nothing: a call that needs no preparation."""


def host_lap_ms(work: Work, prepare: Work = nothing, clock: Callable[[], float] = time.perf_counter) -> float:
    """Wall time in ms of one call of `work` after an untimed `prepare`, where no device works beside the host."""
    prepare()
    start = clock()
    work()
    return 1e3 * (clock() - start)


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
        """Time that events add to the work between them."""
        self.forget()

    def forget(self) -> None:
        """Forget the last call's delay, since the next call is another one."""
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

    def lap_together(self, work: Work, prepare: Work, align: Work) -> Lap:
        """Time one call that several processes make together, so that none of them may repeat it alone.

        The call is behind a delay and then `align`, in which the devices wait for each other: so all of them start on
        the call at about the same time. The cache is left as `prepare` leaves it. `hidden` may be False.
        """
        prepare()
        usual_s = statistics.median_low(self._issued_s) if self._issued_s else FIRST_DELAY_S / DELAY_FACTOR
        self._delay(min(DELAY_FACTOR * usual_s, MAX_DELAY_S))
        begun = time.perf_counter()
        align()
        aligned_s = time.perf_counter() - begun
        lap = self._between_events(work)
        self._issued_s.append(aligned_s + 1e-6 * lap.host_us)
        return Lap(max(lap.device_ms - self.overhead_ms, RESOLUTION_MS), lap.host_us, lap.hidden)

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
        """Return the time in ms that events show around an empty kernel, less the kernel's own."""
        times = []
        for _ in range(EMPTY_KERNELS):
            self._delay(EMPTY_KERNEL_DELAY_S)
            times.append(self._between_events(lambda: torch.cuda._sleep(0)).device_ms)  # type: ignore[no-untyped-call]
        return max(0.0, statistics.median(times) - EMPTY_KERNEL_MS)

    def _delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))  # type: ignore[no-untyped-call]

    def _calibrate(self) -> float:
        """Return the cycles of the device's clock in a second, roughly: it changes with load and heat."""
        for _ in range(2):  # the first loads the kernel
            self._start.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            self._end.record()
            self._end.synchronize()
        return CALIBRATION_CYCLES / (1e-3 * float(self._start.elapsed_time(self._end)))
