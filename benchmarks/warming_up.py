"""When a warm-up ends, and how wrong what follows is: the product's own class, with a simulated device and clock.

    python -m benchmarks.warming_up               # devices that settle, jump or drift
    python -m benchmarks.warming_up --even        # devices that do not, on hosts with noise of several kinds

With another checkout on PYTHONPATH it simulates that one's class. "Bias" is the median over runs of how far the median
of the ten calls that follow is from the final time; "wrong" is the share of runs that are called steady with a bias of
more than 1 %.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from workers.measure.warmup import WarmUp

CALLS = 10
MAX_BIAS = 0.01
ATTENTION, TRAINING = 0.2, 0.5
"""Seconds of a window."""

Curve = Callable[[float], float]
"""The relative time of a call that begins so many seconds after the first."""
Noise = Callable[[float], float]
"""The relative deviation of such a call."""


def settling(share: float, time_constant_s: float) -> Curve:
    """Calls that are faster by `share` at first."""
    return lambda second: 1 - share * math.exp(-second / time_constant_s)


def jumping(share: float, at_s: float) -> Curve:
    """A clock that drops."""
    return lambda second: 1 - share if second < at_s else 1.0


def creeping(per_s: float) -> Curve:
    """A drift that does not end in a minute."""
    return lambda second: 1 - per_s * (60 - second)


DRIFTS: dict[str, tuple[Curve, float]] = {
    "8 % too fast, τ = 1 s": (settling(0.08, 1.0), ATTENTION),
    "8 % too slow, τ = 1 s": (settling(-0.08, 1.0), ATTENTION),
    "15 % too fast, τ = 3 s": (settling(0.15, 3.0), ATTENTION),
    "8 % too fast, τ = 5 s": (settling(0.08, 5.0), TRAINING),
    "8 % too slow, τ = 5 s": (settling(-0.08, 5.0), TRAINING),
    "15 % too fast, τ = 3 s, steps": (settling(0.15, 3.0), TRAINING),
    "jumps by 8 % at 2 s": (jumping(0.08, 2.0), TRAINING),
    "0.5 % slower a second": (creeping(0.005), TRAINING),
}


def normal(rng: random.Random, size: float) -> Noise:
    """Independent deviations."""
    return lambda second: size * rng.gauss(0, 1)


def interrupted(rng: random.Random, size: float) -> Noise:
    """One call of twenty takes longer, by a heavy-tailed time."""
    return lambda second: size * abs(rng.gauss(0, 1)) + (0.1 * rng.paretovariate(1.5) if rng.random() < 0.05 else 0.0)


def bimodal(rng: random.Random, size: float) -> Noise:
    """Two speeds, drawn for each call."""
    return lambda second: 0.2 * size * rng.gauss(0, 1) + (2 * size if rng.random() < 0.4 else 0.0)


def wandering(rng: random.Random, size: float) -> Noise:
    """Deviations that last for half a second: an autoregressive process."""
    state, before = 0.0, 0.0

    def deviation(second: float) -> float:
        nonlocal state, before
        kept = math.exp(-(second - before) / 0.5)
        before, state = second, kept * state + math.sqrt(1 - kept**2) * rng.gauss(0, 1)
        return size * state

    return deviation


NOISES: dict[str, Callable[[random.Random, float], Noise]] = {
    "normal": normal,
    "interrupted": interrupted,
    "bimodal": bimodal,
    "wandering": wandering,
}


class Run(NamedTuple):
    """One simulated warm-up."""

    steady: bool | None
    seconds: float
    bias: float


def simulate(curve: Curve, noise: Noise, call_s: float, window_s: float) -> Run:
    """Warm up, and see what the following calls would take without noise, relative to the final time."""
    now = 0.0
    warming = WarmUp(None, window_s=window_s, clock=lambda: now)
    while not warming.over:
        took_s = call_s * max(0.2, curve(now) + noise(now))
        now += took_s
        warming.add(1e3 * took_s)
    following = (curve(now + index * call_s) for index in range(CALLS))
    return Run(warming.steady, now, statistics.median(following) - 1)


def row(name: str, call_s: float, size: float, window_s: float, runs: list[Run]) -> str:
    """Return a row of the table."""
    steady = [run for run in runs if run.steady]
    shares: list[Any] = [
        len(steady) / len(runs),
        sum(run.steady is False for run in runs) / len(runs),
        statistics.median(abs(run.bias) for run in runs),
        sum(abs(run.bias) > MAX_BIAS for run in steady) / len(runs),
    ]
    cells = [f"{share:.0%}" if index != 2 else f"{share:.1%}" for index, share in enumerate(shares)]
    seconds = statistics.fmean(run.seconds for run in runs)
    return f"| {name} | {window_s:g} | {1e3 * call_s:g} | {size:.1%} | {seconds:.2f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--even", action="store_true", help="times that do not drift")
    parser.add_argument("--runs", type=int, default=100, help="runs of each row (default: 100)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    even: list[tuple[str, Curve, float, str]] = [
        (noise, lambda second: 1.0, window_s, noise) for noise in NOISES for window_s in (ATTENTION, TRAINING)
    ]
    drifting = [(name, curve, window_s, "normal") for name, (curve, window_s) in DRIFTS.items()]
    print("| times | window, s | call, ms | noise | warm-up, s | steady | not steady | bias | wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, curve, window_s, kind in even if options.even else drifting:
        for call_s in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
            for size in (0.001, 0.01, 0.03):
                rng = random.Random(options.seed)
                number = max(3, options.runs // 10) if call_s < 1e-3 else options.runs
                runs = [simulate(curve, NOISES[kind](rng, size), call_s, window_s) for _ in range(number)]
                print(row(name.strip(), call_s, size, window_s, runs), flush=True)


if __name__ == "__main__":
    main()
