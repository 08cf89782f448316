"""Runs the jobs behind a table of docs/measurements.md on a running server, and prints the table.

    flopwatch up                                    # in another terminal
    python -m benchmarks.run training recipe        # benchmarks/specs/training.json, then recipe.json

A file has a base spec, one or more grids, each of which is submitted as a sweep over the base, and the table's columns.
The printed `flopwatch table` command shows the results again; other options of it show more of them.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flopwatch.client import Flopwatch

SPECS = Path(__file__).parent / "specs"


def run(server: Flopwatch, name: str) -> bool:
    """Run the sweeps of a file and print their table; returns True if all jobs have succeeded."""
    content = json.loads((SPECS / f"{name}.json").read_text())
    sweeps = [server.sweep(content["base"], grid, name=name) for grid in content["grids"]]
    counts = [server.wait_for_sweep(sweep)["counts"] for sweep in sweeps]
    named = [word for sweep in sweeps for word in ("--sweep", str(sweep["id"]))]
    shown = ["--columns", ",".join(content["columns"])]
    print(f"$ {shlex.join(['flopwatch', 'table', *named, *shown])}")
    print(server.table_text(sweep=sweeps, columns=content["columns"]), flush=True)
    return all(count["succeeded"] == sum(count.values()) for count in counts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="+", choices=sorted(path.stem for path in SPECS.glob("*.json")))
    with Flopwatch() as server:
        succeeded = [run(server, name) for name in parser.parse_args(arguments).name]
    sys.exit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    main()
