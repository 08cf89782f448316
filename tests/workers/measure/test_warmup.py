"""When a warm-up is over, with a simulated clock."""

from __future__ import annotations

import random

import pytest

from workers.measure.warmup import LIMIT_WINDOWS, MIN_CALLS, WINDOW_CALLS, WINDOW_S, WarmUp, agree


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


@pytest.mark.parametrize("milliseconds", [300.0, 600.0, 1300.0, 3000.0])
@pytest.mark.parametrize("window_s", [WINDOW_S, 0.5])
def test_slow_calls_that_are_even_are_steady(milliseconds: float, window_s: float) -> None:
    warming = Calls(window_s=window_s).run(lambda second: milliseconds)
    assert warming.steady is True
    assert warming.calls == 1 + 2 * WINDOW_CALLS
    assert not warming.too_slow


def test_slow_calls_that_drift_are_not_steady() -> None:
    warming = Calls().run(lambda second: 600.0 + 30.0 * second)
    assert warming.steady is False
    assert warming.calls == 1 + 2 * WINDOW_CALLS


@pytest.mark.parametrize(("milliseconds", "calls"), [(4000.0, 6), (8000.0, MIN_CALLS), (60_000.0, MIN_CALLS)])
def test_calls_of_many_seconds_are_not_judged(milliseconds: float, calls: int) -> None:
    warming = Calls().run(lambda second: milliseconds)
    assert (warming.calls, warming.steady, warming.too_slow) == (calls, None, True)


def test_a_drift_of_eight_percent_in_a_second_is_waited_out() -> None:
    """As on a GPU that heats up: 4.35 ms at first, 4.7 ms after a second."""
    calls = Calls()
    warming = calls.run(lambda second: 4.35 + 0.35 * min(second, 1.0))
    assert warming.steady is True
    assert calls.seconds >= 1.0


def test_an_endless_drift_ends_at_the_limit() -> None:
    calls = Calls()
    warming = calls.run(lambda second: 10.0 * 1.2**second)
    assert warming.steady is False
    assert calls.seconds == pytest.approx(LIMIT_WINDOWS * WINDOW_S, abs=0.1)


def test_longer_windows_see_a_slower_drift_and_take_longer() -> None:
    """Steps of xl on an H200 that reaches its power limit: 72.5 ms at first, 74.2 ms after 1.5 s."""

    def settling(second: float) -> float:
        return 72.5 + 1.7 * min(second / 1.5, 1.0)

    short, long = Calls(), Calls(window_s=0.5)
    assert short.run(settling).steady is True
    assert long.run(settling).steady is True
    assert short.seconds < 0.7, "0.3 % from one window to the next"
    assert long.seconds > 1.0
    endless = Calls(window_s=0.5)
    assert endless.run(lambda second: 10.0 * 1.2**second).steady is False
    assert endless.seconds == pytest.approx(LIMIT_WINDOWS * 0.5, abs=0.1)


def test_a_compiling_first_call_does_not_count() -> None:
    calls = Calls()
    warming = calls.run(lambda second: 80_000.0 if second == 0 else 10.0)
    assert warming.steady is True
    assert calls.seconds == pytest.approx(80.5, abs=0.2)


def test_steadiness_is_of_the_last_windows() -> None:
    """Times are not steady if they stop drifting but drift again before MIN_CALLS calls."""
    warming = WarmUp(None, clock=iter(0.1 * tick for tick in range(1000)).__next__)
    for _ in range(7):
        warming.add(10.0)
    assert warming.steady
    for _ in range(3):
        warming.add(12.0)
    assert not warming.steady


def test_windows_agree_within_a_percent_or_their_noise(rng: random.Random) -> None:
    assert agree([10.0] * 5, [10.09] * 5)
    assert not agree([10.0] * 5, [10.11] * 5)
    noisy = [[rng.gauss(10.0, 1.0) for _ in range(100)] for _ in range(40)]
    agreeing = sum(agree(one, other) for one, other in zip(noisy[::2], noisy[1::2], strict=True))
    assert agreeing >= 8, "noise alone is no drift"
    assert not agree(noisy[0], [sample + 2.0 for sample in noisy[1]])
