"""Do comparisons find what is there, and nothing else? `python -m benchmarks.comparisons gather FILE`; `judge FILE`.

`gather` runs real processes through a real server and worker: jobs of kind `compare`, some of one spec against itself
(A/A), some against the same operation with 3 % more work (A/B). A process is an attention forward pass on one thread.
The longer sequence makes the work: naive attention takes time in proportion to the length's square, and
(130 / 128)² = 1.031.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks._shared import host, started_service
from tools.service import submit, wait_for_job

METRIC = "forward_ms"
SHORT, LONG = 128, 130
JOB_TIMEOUT_S = 7200.0


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
            job = wait_for_job(client, job_id, timeout_s=JOB_TIMEOUT_S)
            if job["state"] != "succeeded":
                raise RuntimeError(f"job {job_id} has {job['state']}: {job['error']}")
            rows = client.get(f"/jobs/{job_id}/measurements").raise_for_status().json()["rows"]
            found["processes"] += [
                {"job": job_id, "unit": row["unit_index"], "length": row["sequence_length"], "ms": row["median"]}
                for row in rows
                if row["metric"] == METRIC
            ]
            path.write_text(json.dumps(found, indent=1))
            print(f"{len(found['processes'])} processes", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gathering = commands.add_parser("gather", help="run the processes")
    gathering.add_argument("file", type=Path)
    gathering.add_argument("--rounds", type=int, default=10)
    gathering.add_argument("--replicates", type=int, default=12)
    gathering.add_argument("--measure-steps", type=int, default=1000)
    arguments = parser.parse_args()
    gather(arguments.file, arguments.rounds, arguments.replicates, arguments.measure_steps)


if __name__ == "__main__":
    main()
