"""Runs jobs with the code of two checkouts, which take turns, and prints the metrics side by side.

    git worktree add .base OLD-COMMIT
    python -m benchmarks.two_trees .base . [--rounds N]
    python -m benchmarks.two_trees .base . --job "ddp strategy=fsdp model.size=large" --job "benchmark device=cpu"

A turn is `flopwatch run` of a job with that checkout on PYTHONPATH; the order of the turns is drawn in each round.
"old" and "new" are medians of the turns, "ratio" is of these, "spread" the largest relative difference between turns of
one checkout; samples and verdicts are those of the first turns. Each checkout warms up in its own way: one that stops
before the chip has reached its power limit seems faster.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

JOBS = (
    "attention implementations=triton num_heads=16 batch_size=1 sequence_lengths=1024,4096,16384 head_dims=64,128,256",
    "benchmark model.size=medium precision=bf16",
)
Rows = dict[str, tuple[float, int, str]]
"""By name: the median, of how many samples it is, and their verdict."""


def rows_of(measurements: Sequence[dict[str, Any]]) -> Rows:
    """Return a row for each metric, phase, case and process of a job, whose name says what distinguishes it."""
    measured = [one for one in measurements if one["median"] is not None]
    labels = [{**one["case"], "process": one["unit_index"]} for one in measured]
    names = dict.fromkeys(name for label in labels for name in label)
    varied = [name for name in names if len({str(label.get(name)) for label in labels}) > 1]
    rows = {}
    for one, label in zip(measured, labels, strict=True):
        phase = [] if (one["phase"] or "") in one["metric"] else [one["phase"]]
        name = ", ".join([*(f"{name}={label.get(name)}" for name in varied), *phase, one["metric"]])
        rows[name] = (one["median"], one["n"], one["validity"])
    return rows


def run(tree: Path, job: str) -> Rows:
    """Run a job in a new interpreter that imports this checkout."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), *known]))}
    command = [sys.executable, "-P", "-c", "from app.cli import main; main()", "run", *shlex.split(job), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True)
    return rows_of(json.loads(done.stdout)["measurements"])


def compared(name: str, old: Sequence[Rows], new: Sequence[Rows]) -> list[str]:
    times = [[turn[name][0] for turn in turns] for turns in (old, new)]
    medians = [statistics.median(values) for values in times]
    spread = max(max(values) / min(values) - 1 if min(values) > 0 else math.inf for values in times)
    ratio = medians[1] / medians[0] if medians[0] else math.nan
    first = (" → ".join(str(turns[0][name][at]) for turns in (old, new)) for at in (1, 2))
    return [name, *(f"{median:.4g}" for median in medians), f"{ratio:.4f}", f"{spread:.1%}", *first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, help="two checkouts: the old one, the new one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--job", action="append", help="the arguments of `flopwatch run`; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    print(f"seed {options.seed}, {options.rounds} rounds")
    for job in options.job or JOBS:
        turns: tuple[list[Rows], list[Rows]] = ([], [])
        for _ in range(options.rounds):
            for side in drawn.sample((0, 1), 2):
                turns[side].append(run(options.trees[side].resolve(), job))
        names = [name for name in turns[0][0] if all(name in turn for side in turns for turn in side)]
        heads = ("row", "old", "new", "ratio", "spread", "samples", "verdict")
        table = tabulate([compared(name, *turns) for name in names], heads, tablefmt="github", disable_numparse=True)
        print(f"\n{job}\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
