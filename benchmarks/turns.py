"""Tests what a load of the host does to comparisons in turns: how often equal sides seem to differ, and how often a
planted slowdown is found, with turns drawn as jobs of kind `compare` draw them, and with the fixed order A B B A.

    python -m benchmarks.turns

Times are simulated: 1, times the load of the process's turn, times noise. Turns and judgement are the product's.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence

from tabulate import tabulate

from app.results import findings
from app.results.findings import Judgement, Row
from app.results.sheet import Cell
from app.specs.compare import blocks_of_turns
from workers.jobs.compare import turns

NOISE = 0.005
LOAD = 0.10
"""By how much more a loaded process takes."""
SLOWER = 0.05
LIMIT_PERCENT = 5.0
SEED = 2026
PERIODS = range(2, 11)

Load = Callable[[int, random.Random], list[float]]
"""Returns the logarithm of each turn's time, but for noise."""


def jump(number: int, rng: random.Random) -> list[float]:
    """Return a load that begins at some turn, and stays."""
    begins = rng.randrange(1, number)
    return [LOAD * (turn >= begins) for turn in range(number)]


def drift(number: int, _rng: random.Random) -> list[float]:
    """Return a load that grows steadily."""
    return [LOAD * turn / number for turn in range(number)]


def autoregressive(number: int, rng: random.Random, memory: float = 0.9, deviation: float = 0.03) -> list[float]:
    """Return a stationary load of which each turn keeps 0.9 of the turn before."""
    found = [rng.gauss(0, deviation)]
    while len(found) < number:
        found.append(memory * found[-1] + math.sqrt(1 - memory**2) * rng.gauss(0, deviation))
    return found


def periodic(period: int) -> Load:
    """Return a load in every first half of a period of turns, which begins anywhere."""

    def load(number: int, rng: random.Random) -> list[float]:
        shift = rng.randrange(period)
        return [LOAD * ((turn + shift) % period < period // 2) for turn in range(number)]

    return load


LOADS: dict[str, Load] = {
    "none": lambda number, _rng: [0.0] * number,
    f"a jump by {LOAD:.0%}": jump,
    f"a drift by {LOAD:.0%}": drift,
    "AR(0.9), 3 %": autoregressive,
    **{f"{LOAD:.0%}, period of {period} turns": periodic(period) for period in PERIODS},
}


def fixed(replicates: int, _seed: int | None) -> list[str]:
    """Return the order A B B A A B B A …"""
    return ["baseline" if turn % 4 in (0, 3) else "candidate" for turn in range(2 * replicates)]


def judged(order: Sequence[str], log_times: Sequence[float], slower: float = 0.0) -> Judgement:
    """Judge a comparison whose processes took these times, those of the candidate longer by `slower`."""
    times: dict[str, list[float]] = {"baseline": [], "candidate": []}
    for side, log_time in zip(order, log_times, strict=True):
        times[side].append(math.exp(log_time) * (1 + slower * (side == "candidate")))
    one, other = (Cell(1.0, None, len(its), "ok") for its in times.values())
    blocks = blocks_of_turns(len(times["baseline"]))
    row = Row("", "step_ms", "ms", (one, other), (None, None), times["baseline"], times["candidate"], blocks)
    rows = findings.judge([row], "step_ms", alternated=True)
    return findings.conclude(rows, "step_ms", [], alternated=True, fail_above_percent=LIMIT_PERCENT)


def shares(load: Load, order: Callable[[int, int | None], Sequence[str]], replicates: int, draws: int) -> list[float]:
    """Return how often equal sides are found to differ, the candidate is found slower, the gate says so, and a planted
    slowdown is found."""
    rng, counts = random.Random(SEED), [0] * 4
    for _ in range(draws):
        sides = order(replicates, rng.randrange(2**31))
        log_times = [time + rng.gauss(0, NOISE) for time in load(len(sides), rng)]
        equal, planted = judged(sides, log_times), judged(sides, log_times, SLOWER)
        assert equal.gate is not None
        found = (
            equal.conclusion in ("better", "worse"),
            equal.conclusion == "worse",
            equal.gate.outcome == "slower",
            planted.conclusion == "worse",
        )
        counts = [count + its for count, its in zip(counts, found, strict=True)]
    return [count / draws for count in counts]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--replicates", type=int, nargs="*", default=[8])
    arguments = parser.parse_args()
    headers = ["load", "turns", "equal found", "found slower", "gate slower", f"{SLOWER:.0%} found"]
    for replicates in arguments.replicates:
        rows = [
            [name, how, *(f"{share:.1%}" for share in shares(load, order, replicates, arguments.draws))]
            for name, load in LOADS.items()
            for how, order in (("A B B A", fixed), ("drawn", turns))
        ]
        print(f"\n{replicates} processes a side, {arguments.draws} comparisons each, seed {SEED}\n")
        print(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
