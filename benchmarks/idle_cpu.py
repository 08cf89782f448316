"""CPU time of a server and a worker that have nothing to do: `python -m benchmarks.idle_cpu`.

It measures with an empty queue, with many queued jobs that the worker cannot run (they need a GPU, which is hidden from
it), and with a client that follows one of them. The worker's figure includes its warm parent. The kernel counts CPU
time in ticks of 10 ms, so measure for a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import psutil

from app.store.database.engine import open_database
from benchmarks._shared import copy_jobs, print_report, started_service
from tools.service import submit, wait_for_job

SETTLE_S = 2.0


def body(device: str) -> dict[str, Any]:
    """A small job: one forward pass."""
    steps = {"mode": "forward", "warmup_steps": 0, "measure_steps": 1}
    return {"spec": {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 16, "device": device, **steps}}


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds so far, user and system, of a process and all its descendants."""
    root = psutil.Process(process.pid)
    times = [member.cpu_times() for member in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measure(situation: str, processes: dict[str, subprocess.Popen[bytes]], seconds: float) -> dict[str, str]:
    """Measure one row of the table."""
    time.sleep(SETTLE_S)
    start = time.monotonic()
    before = {name: cpu_s(process) for name, process in processes.items()}
    time.sleep(seconds)
    after = {name: cpu_s(process) for name, process in processes.items()}
    took = time.monotonic() - start
    row = {"situation": situation}
    for name in processes:
        share = (after[name] - before[name]) / took
        row[f"{name}, CPU s per minute"] = f"{60 * share:.2f}"
        row[f"{name}, % of a core"] = f"{100 * share:.2f}"
    return row


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each situation is measured")
    parser.add_argument("--queued", type=int, default=10_000, help="queued jobs that the worker cannot run")
    arguments = parser.parse_args(given)
    with started_service() as service:
        client = service.client()
        worker = service.start_worker(CUDA_VISIBLE_DEVICES="")
        assert service.server is not None
        processes = {"server": service.server, "worker": worker}
        # A worker that has run a job has done all its late imports.
        wait_for_job(client, submit(client, body("cpu")))
        table = [measure("empty queue", processes, arguments.seconds)]
        waiting = submit(client, body("cuda"))
        with contextlib.closing(open_database(service.settings())) as database:
            copy_jobs(database, waiting, arguments.queued - 1)
        table.append(measure(f"{arguments.queued} jobs that it cannot run", processes, arguments.seconds))
        events = f"/jobs/{waiting}/events"
        with client.stream("GET", events, headers={"Accept": "text/event-stream"}) as response:
            response.raise_for_status()
            table.append(measure("and a client that follows one", processes, arguments.seconds))
        service.stop_processes(worker)
    print_report(f"Idle, {arguments.seconds:g} s each", table)


if __name__ == "__main__":
    main()
