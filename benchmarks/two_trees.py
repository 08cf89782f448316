"""Runs a job in two checkouts, which take turns, and prints the ratios of its metrics.

    git worktree add .base OLD-COMMIT
    python -m benchmarks.two_trees .base . --job "ddp strategy=fsdp model.size=large" [--rounds N]

Each turn is `flopwatch run` of the job in a new interpreter with that checkout on PYTHONPATH. The order of the turns is
drawn in each round. "ratio" is of the medians of the turns, "spread" the largest relative difference between turns of
one checkout.
"""

from __future__ import annotations

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
from pathlib import Path


def in_tree(tree: Path, job: str) -> dict[str, float]:
    """Run the job in a new interpreter that imports this checkout; returns the median of each metric."""
    arguments = ["-c", "from app.cli import main; main()", "run", *shlex.split(job), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *_packages()])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)["measurements"]
    return {
        " ".join(filter(None, (one["metric"], one["phase"]))): one["median"]
        for one in found
        if one["median"] is not None
    }


def _packages() -> list[str]:
    """Return the folders of packages that PYTHONPATH names already."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path)
    parser.add_argument("--job", required=True, help="the arguments of `flopwatch run`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    options = parser.parse_args()
    old, new = options.old.resolve(), options.new.resolve()
    turns: dict[Path, list[dict[str, float]]] = {old: [], new: []}
    drawn = random.Random(options.seed)
    for _ in range(options.rounds):
        for tree in drawn.sample((old, new), 2):
            turns[tree].append(found := in_tree(tree, options.job))
            print(f"{tree}: {found}", file=sys.stderr, flush=True)
    print(f"seed {options.seed}, {options.rounds} rounds")
    print("| metric | old | new | ratio | spread |")
    print("|---|---:|---:|---:|---:|")
    for name in turns[old][0]:
        values = {tree: [one[name] for one in turns[tree] if name in one] for tree in (old, new)}
        if not values[new]:
            continue
        medians = [statistics.median(values[tree]) for tree in (old, new)]
        spread = max(max(each) / min(each) - 1 if min(each) > 0 else math.inf for each in values.values())
        ratio = f"{medians[1] / medians[0] if medians[0] else math.nan:.4f}"
        print(f"| {name} | {medians[0]:.4g} | {medians[1]:.4g} | {ratio} | {spread:.1%} |")


if __name__ == "__main__":
    main()
