"""When a warm-up is over: after a number of calls that was asked for, or when times have stopped drifting.

The first calls of a process allocate, choose kernels and compile; after that a device's clock still falls for a second
while it heats up. So medians of two windows in succession are compared, each long enough for such a drift to show.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

LEAST_CALLS = 5
WINDOW_CALLS = 3
"""At least so many calls are in a window."""
WINDOW_S = 0.2
"""At least so long is a window, unless the caller chooses: 8 % in a second, as seen on an H200, are 1.6 % from one to
the next."""
MAX_DRIFT = 0.01
"""Between the medians of two windows, where their noise is smaller than that."""
LIMIT_WINDOWS = 15
"""So many windows after the first call, which may compile for minutes, times that still drift are measured as they
are: after 3 s, unless the caller chooses longer windows."""
JUDGED_CALLS = 1 + 2 * WINDOW_CALLS
"""Before so many calls there are no two windows to compare."""
MAX_WAIT_S = 20.0
"""Slow calls get longer than LIMIT_WINDOWS, until there are two windows of them, but no longer than this after the
first call: calls of 3 s are judged still, slower ones are not."""


class WarmUp:
    """Takes the times of calls that are made to warm up, and says when it has seen enough.

    Args:
        asked: So many calls, exactly; None: until times are steady, at least LEAST_CALLS.
        window_s: The least length of a window.
        clock: Seconds; another one in tests.
    """

    def __init__(
        self, asked: int | None, *, window_s: float = WINDOW_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.asked = asked
        self.window_s = window_s
        self.calls = 0
        """Made so far."""
        self.steady: bool | None = None
        """Whether times had stopped drifting; None as long as that was not judged."""
        self._clock = clock
        self._started = self._window_started = clock()
        self._before: list[float] = []
        self._window: list[float] = []

    @property
    def over(self) -> bool:
        """Whether measuring may begin."""
        if self.asked is not None:
            return self.calls >= self.asked
        return self.calls >= LEAST_CALLS and (bool(self.steady) or self._limit_is_reached)

    @property
    def too_slow(self) -> bool:
        """Whether nobody could judge, since calls are so long that too few of them fit into the time there is."""
        return self.asked is None and self.steady is None

    @property
    def _limit_is_reached(self) -> bool:
        spent_s, limit_s = self._clock() - self._started, LIMIT_WINDOWS * self.window_s
        return spent_s >= (max(limit_s, MAX_WAIT_S) if self.steady is None else limit_s)

    def add(self, time_ms: float) -> None:
        """One call took so long."""
        self.calls += 1
        if self.asked is not None:
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
    """Whether the medians of two windows are within MAX_DRIFT of each other, or as close as noise lets us tell."""
    first, second = statistics.median(one), statistics.median(other)
    noise = math.hypot(_error_of_median(one, first), _error_of_median(other, second))
    return abs(second - first) <= max(MAX_DRIFT * abs(first), noise)


def _error_of_median(samples: Sequence[float], median: float) -> float:
    """Standard error of the median, from the median absolute deviation, as of normally distributed samples."""
    deviation = 1.4826 * statistics.median(abs(sample - median) for sample in samples)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(samples))
