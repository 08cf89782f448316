"""Tests whether comparisons find real differences and no others, by drawing comparisons from measured processes.

    flopwatch up                                # in another terminal, best with OMP_NUM_THREADS=1 and under taskset
    python -m benchmarks.run comparisons        # some times
    python -m benchmarks.comparisons [DATA_DIR …]

The processes are those of jobs of kind `compare`, some of one spec against itself (A/A), some against the same
operation with 3 % more work (A/B): an attention forward pass on one thread, whose longer sequence is the work, since
naive attention takes time in proportion to the length's square, and (130 / 128)² = 1.031. Several servers, each held to
cores of its own, may measure at once on one host: give the data folder of each. A draw takes its processes from one
server, in the order in which they ran; of two successive ones in a draw, one goes to each side.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tabulate import tabulate

from app.results import findings, inference
from app.results.findings import Row
from app.results.sheet import Cell
from flopwatch.client import Flopwatch

METRIC = "forward_ms"
SHORT, LONG = LENGTHS = (128, 130)
SIZES = (4, 6, 8, 12, 16)
PILOT = 8
PLANTED_PERCENT = 3.0
SEED = 2026

Times = Sequence[float]
T = TypeVar("T")


class Process(NamedTuple):
    """A measured process: its job, its place among the job's processes, its sequence length, and its fastest sample."""

    job: int
    unit: int
    length: int
    ms: float


def processes(server: Flopwatch) -> list[Process]:
    """Return the processes of all comparisons of a server, in the order in which they ran."""
    found = []
    for job in server.list_jobs(kind="compare", state="succeeded", limit=1000):
        rows = server.measurements(job).query("metric == @METRIC")
        columns = zip(rows["unit_index"], rows["sequence_length"], rows["min"], strict=True)
        found += [Process(job["id"], int(unit), int(length), float(ms)) for unit, length, ms in columns]
    return sorted(found)


def judge(series: Sequence[Sequence[Process]], draws: int, rng: random.Random) -> list[tuple[str, dict[str, str]]]:
    """Draw comparisons from the processes of each server; return rows of tables, each with its table's title."""
    pools = [[one.ms for one in measured if one.length == length] for measured in series for length in LENGTHS]
    pools = [pool for pool in pools if len(pool) >= 2 * PILOT]
    if not pools:
        raise SystemExit(f"too few processes: measure {2 * PILOT} of one length or more")
    sizes = [number for number in SIZES if any(len(pool) >= 2 * number for pool in pools)]
    added = f"{PLANTED_PERCENT:g} % added to the times of one side"
    return [
        *(("Equal sides", _equal(pools, number, draws, rng)) for number in sizes),
        (added, _scaled(pools, draws, rng)),
        ("More work on one side", _planted([_turns(measured) for measured in series], draws, rng)),
    ]


def _equal(pools: Sequence[Times], number: int, draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often `number` processes of either side, all of one spec, are found to differ."""
    large = [pool for pool in pools if len(pool) >= 2 * number]

    def from_anywhere() -> Times:
        (pool,) = rng.choices(large, list(map(len, large)))
        return [pool[at] for at in sorted(rng.sample(range(len(pool)), 2 * number))]

    def neighbours() -> Times:
        return _successive(large, 2 * number, rng)

    def in_turns(drawn: Times) -> bool:
        first = rng.randrange(2)
        return _finding(drawn[first::2], drawn[1 - first :: 2]) is not None

    def in_blocks(drawn: Times, *, alternated: bool) -> bool:
        return _finding(drawn[:number], drawn[number:], alternated=alternated) is not None

    def share(draw: Callable[[], bool]) -> str:
        return f"{sum(draw() for _ in range(draws)) / draws:.1%}"

    return {
        "processes of a side": str(number),
        "draws": f"{draws} each",
        "in turns, from anywhere": share(lambda: in_turns(from_anywhere())),
        "in turns, neighbours": share(lambda: in_turns(neighbours())),
        "one side after the other": share(lambda: in_blocks(neighbours(), alternated=True)),
        "the same, drift weighed": share(lambda: in_blocks(neighbours(), alternated=False)),
    }


def _scaled(pools: Sequence[Times], draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often a slowdown of the times is found by as many processes as a pilot of successive ones asks for.

    The others are drawn with replacement, since there may be too few.
    """
    slower = 1 + PLANTED_PERCENT / 100
    hits = equal = 0
    asked = []
    for _ in range(draws):
        (pool,) = rng.choices(pools, list(map(len, pools)))
        pilot = _successive([pool], 2 * PILOT, rng)
        asked.append(_replicates_for(pilot[::2], [slower * ms for ms in pilot[1::2]]))
        one, other = rng.choices(pool, k=asked[-1]), rng.choices(pool, k=asked[-1])
        hits += _finding(one, [slower * ms for ms in other]) == "worse"
        equal += _finding(one, other) is not None
    return {
        "pilots": f"{draws} of {PILOT} processes a side",
        **_asked(asked),
        "found worse": f"{hits / draws:.1%}",
        "without the slowdown": f"{equal / draws:.1%}",
    }


def _turns(measured: Sequence[Process]) -> list[tuple[float, float]]:
    """Return the times of both sides, turn by turn, of the jobs that measured two lengths.

    They are relative to the median of the shorter side, since one core may be faster than another.
    """
    by_job: dict[int, tuple[list[float], list[float]]] = {}
    for process in measured:
        by_job.setdefault(process.job, ([], []))[process.length == LONG].append(process.ms)
    pairs = [pair for sides in by_job.values() for pair in zip(*sides, strict=False)]
    unit = statistics.median(one for one, _ in pairs) if pairs else 1.0
    return [(one / unit, other / unit) for one, other in pairs]


def _planted(series: Sequence[Sequence[tuple[float, float]]], draws: int, rng: random.Random) -> dict[str, str]:
    """Return how often the longer sequence is found by as many turns as a pilot of successive turns asks for."""
    enough = [turns for turns in series if len(turns) >= PILOT]
    if not enough:
        return {"turns": "too few"}
    everything = [turn for turns in enough for turn in turns]
    short, long = zip(*everything, strict=True)
    hits = 0
    asked = []
    for _ in range(draws):
        asked.append(_replicates_for(*zip(*_successive(enough, PILOT, rng), strict=True)))
        hits += _finding(*zip(*rng.choices(everything, k=asked[-1]), strict=True)) == "worse"
    return {
        "turns": str(len(everything)),
        "ratio of all": f"{statistics.median(long) / statistics.median(short):.4f}",
        "pilots": f"{draws} of {PILOT} turns",
        **_asked(asked),
        "found worse": f"{hits / draws:.1%}",
    }


def _successive(pools: Sequence[Sequence[T]], number: int, rng: random.Random) -> Sequence[T]:
    """Draw `number` elements that follow each other, from a pool drawn by its size."""
    (pool,) = rng.choices(pools, list(map(len, pools)))
    start = rng.randrange(len(pool) - number + 1)
    return pool[start : start + number]


def _asked(numbers: Sequence[int]) -> dict[str, str]:
    deciles = statistics.quantiles(numbers, n=10)
    heading = f"asked for {PLANTED_PERCENT:g} %, median (10 … 90 %)"
    return {heading: f"{statistics.median(numbers):g} ({deciles[0]:.0f} … {deciles[-1]:.0f})"}


def _replicates_for(baseline: Times, candidate: Times) -> int:
    """Return how many processes of each side a comparison of these would ask for, to find PLANTED_PERCENT."""
    distances = inference.estimate(baseline, candidate).distances
    number = inference.replicates_for(PLANTED_PERCENT / 100, distances)
    assert number is not None
    return number


def _finding(baseline: Times, candidate: Times, *, alternated: bool = True) -> str | None:
    """Return "better" or "worse" as a comparison that asks for this metric alone finds it; None: no difference."""
    if inference.p_value(baseline, candidate) > inference.ALPHA:
        return None  # without its interval, which takes ten times as long
    cells = (Cell(baseline[0], None, len(baseline), "ok"), Cell(candidate[0], None, len(candidate), "ok"))
    row = Row("", METRIC, "ms", cells, (None, None), list(baseline), list(candidate))
    (judged,) = findings.judge([row], METRIC, alternated=alternated, requested=(METRIC,))
    return judged.finding if judged.finding in ("better", "worse") else None


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path, nargs="*", default=[None], help="of each server; default: the usual one")
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    series = []
    for folder in arguments.data_dir:
        with Flopwatch(data_dir=folder) as server:
            series.append(processes(server))
    titled: dict[str, list[dict[str, str]]] = {}
    for title, row in judge(series, arguments.draws, random.Random(SEED)):
        titled.setdefault(title, []).append(row)
    for title, rows in titled.items():
        print(f"\n{title}: {sum(map(len, series))} processes\n\n{tabulate(rows, headers='keys', tablefmt='pipe')}")


if __name__ == "__main__":
    main()
