"""Decides when a warm-up is over: after a given number of calls, or when times have stopped drifting.

The first calls of a process allocate, choose kernels and compile; after that a device's clock still falls for a second
while it heats up. So it compares the medians of two successive windows, each long enough for such a drift to show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from kernels.clock import now_s

MIN_CALLS = 5
WINDOW_CALLS = 3
"""Smallest number of calls in a window."""
WINDOW_S = 0.2
"""Least seconds of a window, unless the caller chooses. A drift of 8 % in a second, as seen on an H200, is 1.6 % from
one window to the next."""
MAX_DRIFT = 0.01
"""Largest relative difference between steady windows' medians, if their noise is smaller than that."""
LIMIT_WINDOWS = 15
"""Windows after the first call (which may compile for minutes) until measuring begins even if times still drift: 3 s,
unless the caller chooses longer windows."""
MAX_WAIT_S = 20.0
"""Most seconds of a warm-up after the first call. Slow calls may exceed LIMIT_WINDOWS until they fill two windows, but
not this limit: calls of 3 s can still be judged, slower ones cannot."""


def min_calls(fixed_calls: int | None) -> int:
    """Return the least number of calls of a warm-up (see `WarmUp`)."""
    return MIN_CALLS if fixed_calls is None else fixed_calls


class WarmUp:
    """Takes the times of warm-up calls, and decides when the warm-up is over.

    Args:
        fixed_calls: Exact number of calls; None: until times are steady, at least MIN_CALLS.
        window_s: Least length of a window in seconds.
        clock: Returns seconds; tests give another one.
    """

    def __init__(
        self, fixed_calls: int | None, *, window_s: float = WINDOW_S, clock: Callable[[], float] = now_s
    ) -> None:
        self.fixed_calls = fixed_calls
        self.window_s = window_s
        self.calls = 0
        """Number of calls made so far."""
        self.steady: bool | None = None
        """True if times had stopped drifting; None as long as this was not judged."""
        self._clock = clock
        self._started = self._window_started = clock()
        self._before: list[float] = []
        self._window: list[float] = []

    @property
    def over(self) -> bool:
        """Return True if measuring may begin."""
        if self.fixed_calls is not None:
            return self.calls >= self.fixed_calls
        return self.calls >= MIN_CALLS and (bool(self.steady) or self._limit_is_reached)

    @property
    def too_slow(self) -> bool:
        """Return True if `steady` could not be judged, since calls are so long that too few fit into the limit."""
        return self.fixed_calls is None and self.steady is None

    @property
    def _limit_is_reached(self) -> bool:
        spent_s, limit_s = self._clock() - self._started, LIMIT_WINDOWS * self.window_s
        return spent_s >= (max(limit_s, MAX_WAIT_S) if self.steady is None else limit_s)

    def add(self, time_ms: float) -> None:
        """Add the time of one call in ms."""
        self.calls += 1
        if self.fixed_calls is not None:
            return
        now = self._clock()
        if self.calls == 1:
            self._started = self._window_started = now
            return
        self._window.append(time_ms)
        if len(self._window) < WINDOW_CALLS or now - self._window_started < self.window_s:
            return
        if self._before:
            self.steady = agree(self._before, self._window)
        self._before, self._window, self._window_started = self._window, [], now


def agree(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two windows' medians differ by at most MAX_DRIFT or by their noise, whichever is larger."""
    first, second = statistics.median(one), statistics.median(other)
    noise = math.hypot(_error_of_median(one, first), _error_of_median(other, second))
    return abs(second - first) <= max(MAX_DRIFT * abs(first), noise)


def _error_of_median(samples: Sequence[float], median: float) -> float:
    """Estimate the median's standard error from the median absolute deviation, as for normally distributed samples."""
    deviation = 1.4826 * statistics.median(abs(sample - median) for sample in samples)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(samples))
