"""Simulates comparisons with the product's functions: false findings, power, and whether ratios lie in their intervals.

    python -m benchmarks.false_findings [--draws 2000] [--seed 2026]

The first two tables draw one value for each process, of noise that is normal (1 %), heavy-tailed (a quarter of the
processes is slowed down by 20 % on average) or bimodal (half of them by 8 %), and judge them as a comparison does. The
third draws the steps of processes, of which each depends on the one before (AR 0.9, exponential load), and compares
identical code with other numbers of steps on the two sides. The fourth draws a candidate of which only some steps take
longer, on several hosts, and asks a gate at 5 %. The fifth plays diagnoses (`flopwatch why`) of a step with changes
that do nothing, and with one that saves 5 %.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from app.results import findings
from app.results.cases import CaseOfJob
from app.results.findings import Row
from app.results.process_values import process_values
from app.results.sheet import Cell
from app.specs.compare import blocks_of_turns
from app.specs.diagnosis import DiagnosisSpec
from app.store.reading.measurements import Measured
from workers.jobs._base import SoFar, Unit
from workers.jobs.diagnosis import RUNNER, conclude
from workers.measure.measurement import pack

METRIC = "step_ms"
PROCESSES = (4, 5, 8, 16, 30)
CASES = (1, 10, 50)
CHANGES = 8
STEPS = ((5, 300), (10, 40), (50, 50))
LIMIT_PERCENT = 5.0
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
    print_table(
        f"Identical code, with other numbers of steps: {title}",
        (other_steps(steps, number, max(100, draws // 10), rng) for steps in STEPS for number in (4, 8)),
    )
    print_table(
        f"A gate at {LIMIT_PERCENT:g} %, 100 steps of each process: passed: {title}",
        (some_steps(host, number, max(100, draws // 10), rng) for host in HOSTS for number in (8, 24)),
    )
    print_table(
        f"Diagnoses with {CHANGES} changes: a gain is reported: {title}",
        (diagnoses(kind, max(100, draws // 10), rng) for kind in NOISE),
    )


def print_table(title: str, rows: Iterable[Mapping[str, str]]) -> None:
    print(f"\n{title}\n\n{tabulate(list(rows), headers='keys', tablefmt='github', disable_numparse=True)}", flush=True)


def diagnoses(kind: str, draws: int, rng: random.Random) -> dict[str, str]:
    """Return in which share of diagnoses a change is called better: if none helps, and if one saves 5 %."""
    false = sum(bool(gains_of(kind, 1.0, rng)) for _ in range(draws))
    found = sum("change_0" in gains_of(kind, 1 / PLANTED, rng) for _ in range(draws))
    return {"noise": kind, "draws": str(draws), "nothing helps": f"{false / draws:.1%}",
            "one saves 5 %": f"{found / draws:.1%}"}  # fmt: skip


def gains_of(kind: str, factor: float, rng: random.Random) -> set[str]:
    """Play a diagnosis whose first change takes `factor` times as long. Returns the changes that it calls better."""
    spec = DiagnosisSpec.example().model_copy(update={"seed": rng.randrange(1 << 31)})
    known = {"cause": "host", "why_not": None, "removes": False, "how": "", "fields": "{}"}
    tables: dict[str, list[Mapping[str, Any]]] = {
        "turns": [], "candidates": [{"change": f"change_{at}", **known} for at in range(CHANGES)]
    }  # fmt: skip
    units: list[Unit] = []
    planned = RUNNER.plan(spec)
    while planned:
        for unit in planned:
            units.append(unit)
            names = unit.params.get("changes", [])
            time = 100 * math.exp(NOISE[kind](rng)) * (factor if "change_0" in names else 1.0)
            row = {"stage": unit.params["stage"], "changes": ",".join(names), "step_ms": time, "samples": 10}
            row |= {"outcome": "ok", "device_key": None, "unit_index": len(units) - 1}
            tables["turns"].append(row)
        planned = RUNNER.further(spec, SoFar(units, [5.0] * len(units), tables))
    answer = _Answer()
    conclude.run(spec, units[-1], answer)  # type: ignore[arg-type]
    return {row[0] for row in answer.rows if row[6] == "better"}


class _Answer:
    """Takes the table `changes`."""

    def table(self, name: str, _columns: Any, rows: Sequence[Sequence[Any]]) -> None:
        """Keep the rows of that table."""
        if name == "changes":
            self.rows = rows


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
        rows.append(_row(one, other, str(at)))
    return _judged(rows)


def _judged(rows: Sequence[Row]) -> tuple[list[Row], findings.Judgement]:
    found = findings.judge(rows, METRIC, alternated=True)
    return found, findings.conclude(found, METRIC, (), alternated=True, fail_above_percent=LIMIT_PERCENT)


def _row(baseline: Sequence[float], candidate: Sequence[float], case: str = "", **by_samples: Any) -> Row:
    cells = (Cell(baseline[0], None, len(baseline), "ok"), Cell(candidate[0], None, len(candidate), "ok"))
    blocks = blocks_of_turns(len(baseline))
    return Row(case, METRIC, "ms", cells, ("valid", "valid"), list(baseline), list(candidate), blocks, **by_samples)


def other_steps(steps: tuple[int, int], processes: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often identical code is found to differ: by equally many samples, and by all that there are."""
    equally = of_all = 0
    for _ in range(draws):
        sides = [[drawn_steps(number, rng) for _ in range(processes)] for number in steps]
        values = process_values((_case(sides[0]), _case(sides[1])), METRIC, fastest=True)
        one, other = ([row.value for row in rows] for rows in values.sides)
        equally += _judged([_row(one, other)])[1].conclusion in FOUND
        one, other = (list(map(min, side)) for side in sides)
        of_all += _judged([_row(one, other)])[1].conclusion in FOUND
    return {
        "steps of the baseline": str(steps[0]),
        "of the candidate": str(steps[1]),
        "processes of a side": str(processes),
        "draws": str(draws),
        "found to differ": f"{equally / draws:.1%}",
        "by the fastest of all steps": f"{of_all / draws:.1%}",
    }


def some_steps(host: str, processes: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return in which share of comparisons a gate passes a candidate of which these steps take longer."""
    shares = {}
    for name, factor in SLOWED.items():
        passed = 0
        for _ in range(draws):
            _, whole = _judged([row_of_steps(host, factor, processes, rng)])
            assert whole.gate is not None
            passed += whole.gate.outcome == "passed"
        shares[name] = f"{passed / draws:.0%}"
    return {"host": host, "processes of a side": str(processes), "draws": str(draws), **shares}


def row_of_steps(host: str, factor: Callable[[int], float], processes: int, rng: random.Random) -> Row:
    """Draw a comparison of processes of 100 steps; a step of the candidate takes `factor(its number)` times as long."""
    one, other = ([HOSTS[host](100, rng) for _ in range(processes)] for _ in findings.SIDES)
    other = [[factor(step) * time for step, time in enumerate(process)] for process in other]
    values = process_values((_case(one), _case(other)), METRIC, fastest=True)
    first, second = ([row.value for row in rows] for rows in values.sides)
    return _row(first, second, statistic=values.statistic, samples=values.samples, witnesses=values.witnesses)


def drawn_steps(number: int, rng: random.Random) -> list[float]:
    """Return the times in ms of a process's steps: 10 ms, and a load that changes slowly."""
    level, times = rng.gauss(0, 1), []
    for _ in range(number):
        level = 0.9 * level + math.sqrt(1 - 0.9**2) * rng.gauss(0, 1)
        times.append(10 * (1 + 0.1 * math.exp(level)) * (1 + 0.002 * rng.random()))
    return times


def quiet_steps(number: int, rng: random.Random) -> list[float]:
    """Return the times of steps that differ by 0.3 %."""
    return [10 * (1 + abs(rng.gauss(0, 0.005))) for _ in range(number)]


def _stalled(number: int, rng: random.Random) -> list[float]:
    return [time + (rng.expovariate(0.2) if rng.random() < 0.02 else 0) for time in quiet_steps(number, rng)]


def _shared(number: int, rng: random.Random) -> list[float]:
    share = 0.6 * rng.random()
    return [time + (5 * rng.random() if rng.random() < share else 0) for time in quiet_steps(number, rng)]


def _bimodal(number: int, rng: random.Random) -> list[float]:
    mode = rng.choice((1.0, 1.08))
    return [mode * time for time in quiet_steps(number, rng)]


HOSTS: dict[str, Callable[[int, random.Random], list[float]]] = {
    "quiet": quiet_steps,
    "stalls of 5 ms, 1 in 50 steps": _stalled,
    "AR(0.9) load": drawn_steps,
    "a core shared for up to 60 % of a process": _shared,
    "bimodal processes, 8 % apart": _bimodal,
}
SLOWED: dict[str, Callable[[int], float]] = {
    "equal": lambda step: 1.0,
    "two of three 50 % slower": lambda step: 1.5 if step % 3 else 1.0,
    "one of four 30 % slower": lambda step: 1.0 if step % 4 else 1.3,
    "one of twenty takes 3 times": lambda step: 1.0 if step % 20 else 3.0,
}


def _case(processes: Sequence[Sequence[float]]) -> CaseOfJob:
    case = CaseOfJob(1, "benchmark", ("benchmark",), {})
    for at, samples in enumerate(processes):
        case.add(METRIC, _measured(at, samples))
    return case


def _measured(unit: int, samples: Sequence[float]) -> Measured:
    """Return a process's steps as they are read from the store."""
    ordered = sorted(samples)
    facts = (1, 1, unit, "case", "cpu", "valid", "step", METRIC, "ms", "ok", None)
    return Measured(
        *facts, n=len(samples), std=None, case="{}", value=ordered[len(samples) // 2], fastest=ordered[0],
        mean=sum(samples) / len(samples), samples=pack(samples),
    )  # fmt: skip


if __name__ == "__main__":
    main()
