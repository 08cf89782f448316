"""Chaos: attacks a whole Flopwatch from all sides at once, and then checks whether it has kept its promises.

    python -m tests.chaos [--minutes 10] [--seed N] [--only FAULT …] [--keep]
    python -m tests.chaos --stores remote|slurm [--outage-seconds 120] [--stale 1]
    python -m tests.chaos --soak --minutes 30

A server, three workers and seven clients run hostile jobs, while processes are killed and stopped, the disk is full,
the write lock is held and clocks jump (plan.py); PostgreSQL and an object store are away for a while; the daemons of a
Slurm cluster die; workers of an older schema of specs want jobs. When everything has come to rest, the API, the
database, the files and the processes are checked (invariants.py, run.py). The seed is printed: it gives the same faults
at the same times again, and each client the same choices. What they meet depends on how fast the machine is: a failure
may need several runs. A soak is one round of clients and small jobs alone: no process may grow.
Exits with 1 if something is wrong. tests/acceptance/test_chaos.py runs the same for seconds.
"""

import argparse
import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.chaos.plan import BEHAVIOURS, LASTS_S, LOCAL, REMOTE, SLURM, SMALL, faults
from tests.chaos.run import run

KINDS = {"local": LOCAL, "remote": REMOTE, "slurm": SLURM}
ROUND_S = 60.0
"""Length of a round. A long run is rounds with a service of their own each, so that little is lost when one fails."""


def main(arguments: Sequence[str]) -> int:
    """Run rounds until the time is over; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Attack a whole Flopwatch.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the faults go on in all")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the others count on from it")
    parser.add_argument("--round-seconds", type=float, default=ROUND_S, help="length of a round's attack")
    parser.add_argument("--only", nargs="+", choices=sorted(LASTS_S), help="kinds of faults")
    parser.add_argument("--stores", choices=sorted(KINDS), default="local", help="what the service uses")
    parser.add_argument("--outage-seconds", type=float, help="length of outages; then each is once in a round")
    parser.add_argument("--faults-per-second", type=float, default=1.2)
    parser.add_argument("--stale", type=int, default=0, help="workers that read an older schema, beside the others")
    parser.add_argument("--soak", action="store_true", help="one round without faults, in which memory must stay flat")
    parser.add_argument("--keep", action="store_true", help="keep the folders of rounds that fail")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    first = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.soak:
        options.round_seconds = 60 * options.minutes
    rounds = max(1, round(60 * options.minutes / options.round_seconds))
    failed = [seed for seed in range(first, first + rounds) if not one_round(seed, options)]
    print(f"{rounds - len(failed)} of {rounds} rounds were clean" + (f"; failed: seeds {failed}" if failed else ""))
    return 1 if failed else 0


def _end(_signum: int, _frame: FrameType | None) -> None:
    sys.exit(143)  # with everything that a context has to clean up


def one_round(seed: int, options: argparse.Namespace) -> bool:
    """One round; returns True if nothing is wrong."""
    seconds, kinds = options.round_seconds, options.only or KINDS[options.stores]
    print(f"== seed {seed}, {seconds:g} s, {options.stores}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-chaos-"))
    behaviours = SMALL if options.soak else BEHAVIOURS
    often, outage_s = options.faults_per_second, options.outage_seconds
    plan = [] if options.soak else faults(seed, seconds, kinds, per_s=often, outage_s=outage_s)
    result = None
    try:
        stores, stale = options.stores, options.stale
        result = run(folder, seed, seconds, plan, stores=stores, stale=stale, behaviours=behaviours)
    finally:
        if options.keep and (result is None or result.wrong):
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result.summary, indent=1))
    for one in result.wrong:
        print(f"WRONG: {one}")
    return not result.wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
