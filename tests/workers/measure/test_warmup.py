"""When a warm-up is over, with a simulated clock."""

import math
import random
import tracemalloc
from collections.abc import Callable

import pytest

from workers.measure.warmup import LIMIT_WINDOWS, WINDOW_CALLS, WINDOW_S, WarmUp


class Calls:
    """Simulated calls; a function of the seconds since the start gives the duration of each."""

    def __init__(self, fixed_calls: int | None = None, window_s: float = WINDOW_S) -> None:
        self.now = 1000.0
        self.warming = WarmUp(fixed_calls, window_s=window_s, clock=lambda: self.now)

    def run(self, milliseconds, first_s: float = 0.0) -> WarmUp:
        start = self.now
        self.now += first_s
        while not self.warming.over:
            time_ms = milliseconds(self.now - start)
            self.now += 1e-3 * time_ms
            self.warming.add(time_ms)
        self.seconds = self.now - start
        return self.warming


@pytest.mark.parametrize("fixed_calls", [0, 1, 7])
def test_a_number_is_exactly_that_and_nobody_judges(fixed_calls: int) -> None:
    warming = Calls(fixed_calls).run(lambda second: 10 + 10 * second)
    assert (warming.calls, warming.steady) == (fixed_calls, None)


def test_even_times_are_steady_after_two_windows() -> None:
    calls = Calls()
    warming = calls.run(lambda second: 10.0)
    assert warming.steady is True
    assert 0.4 <= calls.seconds <= 0.6


@pytest.mark.parametrize(
    ("milliseconds", "window_s"), [(300.0, WINDOW_S), (600.0, 0.5), (1300.0, 0.5), (3000.0, WINDOW_S)]
)
def test_slow_calls_that_are_even_are_steady(milliseconds: float, window_s: float) -> None:
    warming = Calls(window_s=window_s).run(lambda second: milliseconds)
    assert warming.steady is True
    assert warming.calls == 1 + 2 * WINDOW_CALLS
    assert not warming.too_slow


def test_quick_calls_take_little_memory() -> None:
    tracemalloc.start()
    warming = Calls().run(lambda second: 3e-2 * 1.2**second)
    kept, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert warming.calls > 10_000
    assert kept < 12 * warming.calls, "a list of numbers would take 32 bytes for each"


def test_slow_calls_that_drift_are_not_steady() -> None:
    warming = Calls().run(lambda second: 600.0 + 30.0 * second)
    assert warming.steady is False


def test_an_endless_drift_ends_at_the_limit() -> None:
    calls = Calls()
    warming = calls.run(lambda second: 10.0 * 1.2**second)
    assert warming.steady is False
    assert calls.seconds == pytest.approx(LIMIT_WINDOWS * WINDOW_S, abs=0.1)


def settling(share: float, time_constant_s: float) -> Callable[[float], float]:
    return lambda second: 10.0 * (1 - share * math.exp(-second / time_constant_s))


@pytest.mark.parametrize("direction", [1, -1], ids=["too fast", "too slow"])
@pytest.mark.parametrize(
    ("share", "time_constant_s", "window_s", "lasts_s"),
    [(0.08, 1.0, WINDOW_S, 4.0), (0.08, 5.0, 0.5, 15.0), (0.15, 3.0, 0.5, 15.0), (0.05, 0.5, WINDOW_S, 3.0)],
)
def test_a_device_that_settles_is_waited_out(share, time_constant_s, window_s, lasts_s, direction, rng) -> None:
    """By windows of this length it changes by less than a percent from one to the next long before."""
    curve = settling(direction * share, time_constant_s)
    calls = Calls(window_s=window_s)
    assert calls.run(lambda second: curve(second) * rng.gauss(1.0, 0.001)).steady is True
    assert curve(calls.seconds) == pytest.approx(10.0, rel=0.01)
    assert calls.seconds <= lasts_s


@pytest.mark.parametrize("size", [0.003, 0.01, 0.03])
def test_noise_never_makes_a_drift_steady(size: float, rng: random.Random) -> None:
    """Where it hides the drift, nothing is said of steadiness, and the warm-up takes no longer."""
    curve, wrong = settling(0.08, 5.0), 0
    for _ in range(30):
        calls = Calls(window_s=0.5)
        warming = calls.run(lambda second: curve(second) * rng.gauss(1.0, size))
        wrong += bool(warming.steady) and curve(calls.seconds) < 9.9
        assert (warming.hidden is not None) == (warming.steady is None)
    assert wrong <= 5


@pytest.mark.parametrize("size", [0.001, 0.01, 0.03])
def test_noise_alone_takes_no_longer(size: float, rng: random.Random) -> None:
    runs = [Calls() for _ in range(60)]
    verdicts = [calls.run(lambda second: rng.gauss(10.0, 10.0 * size)).steady for calls in runs]
    assert sum(calls.seconds for calls in runs) / len(runs) < 0.65, "two windows of 0.2 s, and a third now and then"
    assert sum(verdict is False for verdict in verdicts) <= 2
    assert size > 0.001 or all(verdicts)


def test_a_compiling_first_call_does_not_count() -> None:
    calls = Calls()
    warming = calls.run(lambda second: 80_000.0 if second == 0 else 10.0)
    assert warming.steady is True
    assert calls.seconds == pytest.approx(80.5, abs=0.2)
