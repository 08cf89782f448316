"""Memory and time of an agent that ends a job with many measurements: `python -m benchmarks.finish_memory`.

A process of its own, for each number, sends measurements to a spool as a unit's process would, and commits them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import open_database
from app.store.queue.transitions import Queue
from app.store.records import Finish, NewJob, Offer
from benchmarks._shared import print_report
from workers.agent.spool import Spool
from workers.measure.measurement import Measurement

METRICS = 10
SAMPLES = [1.0 + number / 64 for number in range(20)]


def peak_mib() -> float:
    """Return the greatest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def finish(folder: Path, count: int) -> dict[str, float]:
    """Spool and commit `count` measurements; returns memory in MiB and times in seconds."""
    spec = spec_adapter.validate_python({"kind": "attention"})
    with contextlib.closing(open_database(Settings(data_dir=folder))) as database:
        queue = Queue(database)
        queue.submit(NewJob(spec))
        offer = Offer(frozenset({"attention"}), spec.requirements(), total_gpus=0, free_gpus=0, idle=True)
        claim = queue.claim("worker", offer)
        if claim is None:
            raise RuntimeError("the job cannot be claimed")
        at_start, spool = peak_mib(), Spool()
        spool.begin_unit(0, "cells")
        coordinates = spec.cases()[0].coordinates
        begin = time.perf_counter()
        for number in range(count):
            cell, metric = divmod(number, METRICS)
            case = {**coordinates, "sequence_length": cell}
            row = Measurement(case, f"{cell:020d}", "1x CPU", "forward", f"m{metric}_ms", "ms", samples=SAMPLES)
            spool.add_measurement(json.loads(json.dumps(row.to_wire())))  # as from the pipe
        spooled, peak_spooled = time.perf_counter(), peak_mib()
        queue.finish(claim, Finish("succeeded", measurements=spool.measurements, units=spool.units))
        ended = time.perf_counter()
    return {
        "start": at_start,
        "spooled": peak_spooled,
        "peak": peak_mib(),
        "spool_s": spooled - begin,
        "finish_s": ended - spooled,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=int, nargs="+", default=[1000, 150_000, 1_000_000])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
        if arguments.child is not None:
            print(json.dumps(finish(Path(folder) / "data", arguments.child)))
            return
    table = []
    for count in arguments.measurements:
        command = [sys.executable, "-m", "benchmarks.finish_memory", "--child", str(count)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        table.append(
            {
                "measurements": str(count),
                "before, MiB": f"{found['start']:.0f}",
                "all spooled, MiB": f"{found['spooled']:.0f}",
                "peak, MiB": f"{found['peak']:.0f}",
                "spooling, s": f"{found['spool_s']:.1f}",
                "committing, s": f"{found['finish_s']:.1f}",
            }
        )
    print_report("An agent that ends a job", table)


if __name__ == "__main__":
    main()
