"""Simulates comparisons with the product's functions: false findings, power, and whether ratios lie in their intervals.

    python -m benchmarks.false_findings [--draws 2000] [--seed 2026]

The tables draw one value for each process, of noise that is normal (1 %), heavy-tailed (a quarter of the processes is
slowed down by 20 % on average) or bimodal (half of them by 8 %), and judge them as a comparison does.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable, Mapping

from tabulate import tabulate

from app.results import findings
from app.results.findings import Row
from app.results.sheet import Cell
from app.specs.compare import blocks_of_turns

METRIC = "step_ms"
PROCESSES = (4, 5, 8, 16, 30)
CASES = (1, 10, 50)
PLANTED = 1.05
FOUND = ("better", "worse", "changed", "mixed")
NOISE: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: rng.gauss(0, 0.01),
    "heavy-tailed": lambda rng: rng.gauss(0, 0.005) + (rng.expovariate(5) if rng.random() < 0.25 else 0.0),
    "bimodal": lambda rng: rng.gauss(0, 0.003) + rng.choice((0.0, 0.08)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    rng, draws = random.Random(arguments.seed), arguments.draws
    title = f"{draws} draws (of many cases fewer), seed {arguments.seed}"
    print_table(
        f"Comparisons of equal sides that find a difference in some case: {title}",
        (false_findings(kind, number, draws, rng) for kind in NOISE for number in PROCESSES),
    )
    print_table(
        f"One case, the candidate {PLANTED - 1:.0%} slower: {title}",
        (planted(kind, number, draws, rng) for kind in NOISE for number in PROCESSES),
    )


def print_table(title: str, rows: Iterable[Mapping[str, str]]) -> None:
    print(f"\n{title}\n\n{tabulate(list(rows), headers='keys', tablefmt='github', disable_numparse=True)}", flush=True)


def false_findings(kind: str, processes: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return in which share of comparisons any of so many equal cases is found to differ."""
    shares = {}
    for cases in CASES:
        several = max(draws // 4, draws // cases)
        found = sum(judged(kind, processes, cases, 1.0, rng)[1].conclusion in FOUND for _ in range(several))
        shares[f"{cases} case{'s' if cases > 1 else ''}"] = f"{found / several:.1%}"
    return {"noise": kind, "processes of a side": str(processes), **shares}


def planted(kind: str, processes: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often a slowdown is found, and how often the ratio lies outside its interval."""
    found = outside = 0
    for _ in range(draws):
        (row,), whole = judged(kind, processes, 1, PLANTED, rng)
        assert row.estimate is not None
        assert row.estimate.ratio is not None
        assert row.estimate.low is not None
        assert row.estimate.high is not None
        found += whole.conclusion == "worse"
        outside += not row.estimate.low <= row.estimate.ratio <= row.estimate.high
    return {
        "noise": kind,
        "processes of a side": str(processes),
        "found": f"{found / draws:.1%}",
        "ratio outside its interval": f"{outside / draws:.1%}",
    }


def judged(
    kind: str, processes: int, cases: int, factor: float, rng: random.Random
) -> tuple[list[Row], findings.Judgement]:
    """Draw and judge a comparison of so many cases, in each of which the candidate takes `factor` times as long."""
    rows = []
    for at in range(cases):
        one, other = ([scale * math.exp(NOISE[kind](rng)) for _ in range(processes)] for scale in (1.0, factor))
        cells = (Cell(one[0], None, processes, "ok"), Cell(other[0], None, processes, "ok"))
        rows.append(Row(str(at), METRIC, "ms", cells, ("valid", "valid"), one, other, blocks_of_turns(processes)))
    metrics = findings.choose(rows, ())
    found = findings.judge(rows, alternated=True)
    return found, findings.conclude(found, metrics, (), alternated=True)


if __name__ == "__main__":
    main()
