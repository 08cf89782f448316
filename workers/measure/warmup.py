"""Decides when a warm-up is over: after a given number of calls, or when times have stopped drifting.

The first calls of a process allocate, choose kernels and compile; after that a device's clock still falls for seconds
while it heats up, by less from one window to the next than stands out there. So the trend over the later half of the
warm-up decides: going on for HORIZON more windows, it must change times by less than MAX_BIAS. Where noise alone would
show more than that, nobody can tell within two windows, and measuring begins all the same; `hidden` says how large a
change the noise may hide. Only after a trend that stood out clearly does the warm-up last until its end is seen.
"""

from array import array
from collections.abc import Callable

from kernels.clock import now_s
from workers.measure.statistics import trend

MIN_CALLS = 5
WINDOW_CALLS = 3
"""Smallest number of calls in a window."""
MOST_CALLS = 1000
"""Most calls of a window that are kept: calls in between take no memory, which would seem to be the work's."""
WINDOW_S = 0.2
"""Least seconds of a window, unless the caller chooses. The later half of the windows is judged, and at least two."""
HORIZON = 10
"""Windows for which a trend is taken to go on: the time constant of a device that settles."""
MAX_BIAS = 0.01
"""Largest relative change of steady times in HORIZON windows."""
MAX_DRIFT = 0.01
"""A change from one half of the judged calls to the other that is a drift unless it is within one standard error."""
SEEN, CLEAR = 3.0, 4.0
"""Standard errors of a smaller change that is a drift, and of one that stands out clearly."""
MAX_HIDDEN = 0.05
"""Largest change in HORIZON windows that noise may hide where times are called steady. A device that is 8 % too fast
at first, with a time constant of HORIZON windows, changes by 0.7 % from one window to the next."""
LIMIT_WINDOWS = 30
"""Windows after the first call (which may compile for minutes) until measuring begins even if times still drift: 6 s,
unless the caller chooses longer windows."""
MAX_WAIT_S = 20.0
"""Most seconds of a warm-up after the first call. Slow calls may exceed LIMIT_WINDOWS until they fill two windows, but
not this limit: calls of 3 s can still be judged, slower ones cannot."""


def min_calls(fixed_calls: int | None) -> int:
    """Return the least number of calls of a warm-up (see `WarmUp`)."""
    return MIN_CALLS if fixed_calls is None else fixed_calls


class WarmUp:
    """Takes the times of warm-up calls, and decides when the warm-up is over. `fixed_calls`: exact number of calls;
    None: until times are steady, at least MIN_CALLS. `window_s`: least length of a window in seconds. `clock`: returns
    seconds; tests give another one."""

    def __init__(
        self, fixed_calls: int | None, *, window_s: float = WINDOW_S, clock: Callable[[], float] = now_s
    ) -> None:
        self.fixed_calls = fixed_calls
        self.window_s = window_s
        self.calls = 0
        """Number of calls made so far."""
        self.steady: bool | None = None
        """True if times had stopped drifting; None if this is not known: see `hidden` and `too_slow`."""
        self.hidden: float | None = None
        """The relative change of times in HORIZON windows that noise may hide, where it is too large to call them
        steady."""
        self._judged = self._drifted = False
        self._clock = clock
        self._started = self._window_started = clock()
        self._at, self._ms = array("d"), array("d")
        self._windows: list[int] = [0]
        """The index of the first call of each window."""

    @property
    def over(self) -> bool:
        """Return True if measuring may begin."""
        if self.fixed_calls is not None:
            return self.calls >= self.fixed_calls
        settled = self._judged and self.steady is not False
        return self.calls >= MIN_CALLS and (settled or self._limit_is_reached)

    @property
    def too_slow(self) -> bool:
        """Return True if `steady` could not be judged, since calls are so long that too few fit into the limit."""
        return self.fixed_calls is None and not self._judged

    @property
    def _limit_is_reached(self) -> bool:
        spent_s, limit_s = self._clock() - self._started, LIMIT_WINDOWS * self.window_s
        return spent_s >= (limit_s if self._judged else max(limit_s, MAX_WAIT_S))

    def add(self, time_ms: float) -> None:
        self.calls += 1
        if self.fixed_calls is not None:
            return
        now = self._clock()
        if self.calls == 1:
            self._started = self._window_started = now
            return
        if self._at and now - self._started - self._at[-1] < self.window_s / MOST_CALLS:
            return
        self._at.append(now - self._started)
        self._ms.append(time_ms)
        if len(self._ms) - self._windows[-1] < WINDOW_CALLS or now - self._window_started < self.window_s:
            return
        self._window_started = now
        self._windows.append(len(self._ms))
        if len(self._windows) > 2:
            self._judge()

    def _judge(self) -> None:
        first = self._windows[min(len(self._windows) // 2, len(self._windows) - 3)]
        at, ms = self._at[first:], self._ms[first:]
        slope, error = trend(at, ms)
        horizon_s, half_s = HORIZON * self.window_s, (at[-1] - at[0]) / 2
        unseen = max(error, min(SEEN * error, MAX_DRIFT / half_s))
        self._drifted |= abs(slope) > max(CLEAR * error, MAX_BIAS / horizon_s)
        told = unseen * horizon_s <= (2 * MAX_BIAS if self._drifted else MAX_HIDDEN)
        self._judged, self.hidden = True, None
        if abs(slope) > max(unseen, MAX_BIAS / horizon_s) or (self._drifted and not told):
            self.steady = False
        elif told:
            self.steady = True
        else:
            self.steady, self.hidden = None, unseen * horizon_s
