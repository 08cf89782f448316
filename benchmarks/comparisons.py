"""Tests whether comparisons find real differences and no others: `python -m benchmarks.comparisons gather FILE`; `judge
FILE …`.

`gather` runs real processes through a real server and worker: jobs of kind `compare`, some of one spec against itself
(A/A), some against the same operation with 3 % more work (A/B). A process is an attention forward pass on one thread.
The longer sequence makes the work: naive attention takes time in proportion to the length's square, and
(130 / 128)² = 1.031.

`judge` draws comparisons from those processes, whose order stays: of two that follow each other in a draw, one goes to
each side, as in a job that measures in turns. Several gatherings may run on one host at once, each held to cores of its
own (taskset); a draw takes its processes from one of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.results import inference, judging
from app.results.judging import Row
from app.results.sheet import Cell
from benchmarks._shared import host, print_report, started_service, wait_for_success
from tools.service import submit

METRIC = "forward_ms"
SHORT, LONG = LENGTHS = (128, 130)
JOB_TIMEOUT_S = 7200.0
SIZES = (4, 6, 8, 12, 16)
PILOT = 8
PLANTED_PERCENT = 3.0
SEED = 2026


def spec(length: int, measure_steps: int) -> dict[str, Any]:
    """Return the spec of one side. A call takes a third of a millisecond, less than a turn of the scheduler."""
    return {
        "kind": "attention",
        "implementations": ["cpu_naive"],
        "head_dims": [16],
        "sequence_lengths": [length],
        "dtypes": ["fp32"],
        "batch_size": 1,
        "mode": "forward",
        "warmup_steps": 50,
        "measure_steps": measure_steps,
        "device": "cpu",
    }


def gather(path: Path, rounds: int, replicates: int, measure_steps: int) -> None:
    """Run `rounds` times an A/B job and an A/A job of half as many turns; write the processes' medians after each."""
    found: dict[str, Any] = {"host": host(), "processes": []}
    short, long = (spec(length, measure_steps) for length in (SHORT, LONG))
    with started_service() as service:
        service.start_worker(OMP_NUM_THREADS="1", TMPDIR=str(service.folder))
        client = service.client()
        for number in range(2 * rounds):
            is_planted = number % 2 == 0
            turns = replicates if is_planted else max(1, replicates // 2)
            compared = {"kind": "compare", "baseline": short, "candidate": long if is_planted else short}
            job_id = submit(client, {"spec": {**compared, "replicates": turns}, "timeout_s": "none"})
            wait_for_success(client, job_id, timeout_s=JOB_TIMEOUT_S)
            rows = client.get(f"/jobs/{job_id}/measurements").raise_for_status().json()["rows"]
            found["processes"] += [
                {"job": job_id, "unit": row["unit_index"], "length": row["sequence_length"], "ms": row["median"]}
                for row in rows
                if row["metric"] == METRIC
            ]
            path.write_text(json.dumps(found, indent=1))
            print(f"{len(found['processes'])} processes", flush=True)


def judge(paths: Sequence[Path], draws: int) -> None:
    """Draw comparisons from the processes, in which time goes on as in a real one, and print what they find."""
    gathered = [json.loads(path.read_text()) for path in paths]
    series = [sorted(found["processes"], key=lambda one: (one["job"], one["unit"])) for found in gathered]
    pools = [[one["ms"] for one in processes if one["length"] == length] for processes in series for length in LENGTHS]
    counts = [sum(one["length"] == length for processes in series for one in processes) for length in LENGTHS]
    pools = [pool for pool in pools if len(pool) >= 2 * PILOT]
    sizes = [number for number in SIZES if any(len(pool) >= 2 * number for pool in pools)]
    if not sizes:
        raise SystemExit(f"{sum(counts)} processes are too few: gather {2 * PILOT} of one length or more in a file")
    rng = random.Random(SEED)
    print(f"{sum(counts)} processes: {counts[0]} with {SHORT} positions, {counts[1]} with {LONG}")
    for host_line in sorted({found["host"] for found in gathered}):
        print(f"gathered on {host_line}; judged with SciPy {importlib.metadata.version('scipy')}")
    print_report("Equal sides", [_equal(pools, number, draws, rng) for number in sizes])
    print_report(f"{PLANTED_PERCENT:g} % added to the times of one side", [_scaled(pools, draws, rng)])
    print_report("More work on one side", [_planted([_turns(processes) for processes in series], draws, rng)])


def _equal(pools: Sequence[Sequence[float]], number: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often `number` processes of either side, all of one spec, are found to differ."""
    large = [pool for pool in pools if len(pool) >= 2 * number]
    weights = [len(pool) for pool in large]

    def some() -> list[float]:
        """Return processes from anywhere, in the order in which they ran."""
        (pool,) = rng.choices(large, weights)
        return [pool[at] for at in sorted(rng.sample(range(len(pool)), 2 * number))]

    def neighbours() -> list[float]:
        """Return processes that ran one after the other."""
        (pool,) = rng.choices(large, weights)
        start = rng.randrange(len(pool) - 2 * number + 1)
        return list(pool[start : start + 2 * number])

    def in_turns(chosen: Sequence[float]) -> str | None:
        first = rng.randrange(2)
        return _finding(chosen[first::2], chosen[1 - first :: 2])

    def in_blocks(chosen: Sequence[float], *, weighed: bool) -> str | None:
        return _finding(chosen[:number], chosen[number:], alternated=not weighed)

    def share(draw: Callable[[], str | None]) -> str:
        return f"{sum(draw() is not None for _ in range(draws)) / draws:.1%}"

    return {
        "processes of a side": str(number),
        "draws": f"{draws} each",
        "in turns, from anywhere": share(lambda: in_turns(some())),
        "in turns, neighbours": share(lambda: in_turns(neighbours())),
        "one side after the other": share(lambda: in_blocks(neighbours(), weighed=False)),
        "the same, drift weighed": share(lambda: in_blocks(neighbours(), weighed=True)),
    }


def _scaled(pools: Sequence[Sequence[float]], draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often a slowdown is found by as many processes as a pilot of PILOT on each side asked for.

    The pilot's processes followed each other; the others are drawn with replacement, since there may be too few. The
    slowdown is put on the measured times.
    """
    slower = 1 + PLANTED_PERCENT / 100
    hits = equal = 0
    asked = []
    for _ in range(draws):
        (pool,) = rng.choices(pools, [len(pool) for pool in pools])
        start = rng.randrange(len(pool) - 2 * PILOT + 1)
        pilot = pool[start : start + 2 * PILOT]
        wanted = _replicates_for(pilot[::2], [slower * time for time in pilot[1::2]])
        assert wanted is not None
        asked.append(wanted)
        one, other = rng.choices(pool, k=wanted), rng.choices(pool, k=wanted)
        hits += _finding(one, [slower * time for time in other]) == "worse"
        equal += _finding(one, other) is not None
    deciles = statistics.quantiles(asked, n=10)
    return {
        "pilots": f"{draws} of {PILOT} processes a side",
        f"asked for {PLANTED_PERCENT:g} %, median (10 … 90 %)": (
            f"{statistics.median(asked):g} ({deciles[0]:.0f} … {deciles[-1]:.0f})"
        ),
        "found worse": f"{hits / draws:.1%}",
        "without the slowdown": f"{equal / draws:.1%}",
    }


def _turns(processes: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the times of both sides, turn by turn, of the jobs that measured two lengths."""
    by_turn = {(one["job"], one["unit"]): one for one in processes}
    return [
        (one["ms"], other["ms"])
        for (job, unit), one in by_turn.items()
        if unit % 2 == 0 and (other := by_turn.get((job, unit + 1))) and one["length"] != other["length"]
    ]


def _planted(series: Sequence[Sequence[tuple[float, float]]], draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often the planted work is found by as many turns as a pilot of PILOT turns asked for.

    The pilot's turns followed each other; the others are drawn with replacement from all, since there may be too few.
    Times are relative to the median of their gathering's shorter side, since one core may be faster than another.
    """
    enough = [_relative(pairs) for pairs in series if len(pairs) >= PILOT]
    everything = [pair for pairs in enough for pair in pairs]
    ratio = statistics.median(other for _, other in everything) / statistics.median(one for one, _ in everything)
    hits = 0
    asked = []
    for _ in range(draws):
        (pairs,) = rng.choices(enough, [len(pairs) for pairs in enough])
        start = rng.randrange(len(pairs) - PILOT + 1)
        wanted = _replicates_for(*_of_pairs(pairs[start : start + PILOT]))
        assert wanted is not None
        asked.append(wanted)
        hits += _finding(*_of_pairs(rng.choices(everything, k=wanted))) == "worse"
    deciles = statistics.quantiles(asked, n=10)
    return {
        "turns": str(len(everything)),
        "ratio of all": f"{ratio:.4f}",
        "pilots": f"{draws} of {PILOT} turns",
        f"asked for {PLANTED_PERCENT:g} %, median (10 … 90 %)": (
            f"{statistics.median(asked):g} ({deciles[0]:.0f} … {deciles[-1]:.0f})"
        ),
        "found worse": f"{hits / draws:.1%}",
    }


def _relative(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    unit = statistics.median(one for one, _ in pairs)
    return [(one / unit, other / unit) for one, other in pairs]


def _of_pairs(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _replicates_for(baseline: Sequence[float], candidate: Sequence[float]) -> int | None:
    """Return how many processes of each side a comparison of these would ask for, to find PLANTED_PERCENT."""
    spread = inference.spread_between(baseline, candidate)
    assert spread is not None
    limit = inference.spread_limit(spread, len(baseline) + len(candidate) - 2)
    return inference.replicates_for(PLANTED_PERCENT / 100, limit)


def _finding(baseline: Sequence[float], candidate: Sequence[float], *, alternated: bool = True) -> str | None:
    """Return what a comparison finds that asks for this metric alone; None if it is no difference."""
    if inference.p_value(baseline, candidate) > inference.ALPHA:
        return None  # without its interval, which takes ten times as long
    cells = (Cell(baseline[0], None, len(baseline), "ok"), Cell(candidate[0], None, len(candidate), "ok"))
    row = Row("", METRIC, "ms", cells, (None, None), list(baseline), list(candidate))
    (judged,) = judging.judge([row], METRIC, alternated=alternated, asked=(METRIC,))
    return judged.finding if judged.finding in ("better", "worse") else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gathering = commands.add_parser("gather", help="run the processes")
    gathering.add_argument("file", type=Path)
    gathering.add_argument("--rounds", type=int, default=10)
    gathering.add_argument("--replicates", type=int, default=12)
    gathering.add_argument("--measure-steps", type=int, default=1000)
    judging_ = commands.add_parser("judge", help="draw comparisons from them")
    judging_.add_argument("file", type=Path, nargs="+", help="one or more that gather wrote")
    judging_.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.command == "gather":
        gather(arguments.file, arguments.rounds, arguments.replicates, arguments.measure_steps)
    else:
        judge(arguments.file, arguments.draws)


if __name__ == "__main__":
    main()
