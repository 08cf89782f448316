"""The time that the service adds to a job: `python -m benchmarks.job_overhead`.

Small jobs, one after the other, on a real server and a worker with a warm parent. All times are this host's wall clock,
taken in three places: by the client; in the database's events; and in the worker's log, to the millisecond, which tells
when the runner's first and last message arrived. Measurements on the CPU run alone on their host: stop other workers
first, or these jobs wait for theirs.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import httpx

from benchmarks._shared import percentiles, print_report, started_service
from tools.service import submit

WARMUP = 3
MESSAGE = re.compile(r"^(\S+ \S+) DEBUG job-(\d+): (started|outcome)$", re.MULTILINE)
PAUSE_S = 0.1
"""Jobs are submitted at random moments within this time, so that they don't keep step with a polling loop."""

INTERVALS = {
    "submit → answered": ("submit", "answered"),
    "submit → claimed": ("submit", "claimed"),
    "claimed → first line of the runner": ("claimed", "first line"),
    "first line of the runner → recorded": ("first line", "first line recorded"),
    "**submit → first line of the runner, recorded**": ("submit", "first line recorded"),
    "submit → first line of the runner, seen by the client": ("submit", "first line seen"),
    "first → last message of the runner (the job itself)": ("first line", "runner's end"),
    "**runner's end → succeeded**": ("runner's end", "succeeded"),
    "runner's end → succeeded, seen by the client": ("runner's end", "succeeded seen"),
    "submit → succeeded, seen by the client": ("submit", "succeeded seen"),
}


def body(device: str) -> dict[str, Any]:
    """Return the job: one forward pass of the smallest model."""
    spec = {
        "kind": "benchmark",
        "model": {"size": "tiny"},
        "batch_size": 1,
        "context_length": 16,
        "mode": "forward",
        "warmup_steps": 0,
        "measure_steps": 1,
        "device": device,
    }
    return {"spec": spec, "name": "overhead"}


def run_job(client: httpx.Client, device: str) -> tuple[int, dict[str, float]]:
    """Submit a job and follow it to its end; returns its id, and for each event its time on the wall clock, in s."""
    times = {"submit": time.time()}
    job_id = submit(client, body(device))
    times["answered"] = time.time()
    with client.stream("GET", f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line == "event: progress":
                times.setdefault("first line seen", time.time())
            elif line == "event: done":
                times["succeeded seen"] = time.time()
    for event in client.get(f"/jobs/{job_id}/events").raise_for_status().json()["data"]:
        at = datetime.fromisoformat(event["created_at"]).timestamp()
        match event["type"], event["data"].get("state"):
            case "state", "running":
                times["claimed"] = at
            case "progress", _:
                times.setdefault("first line recorded", at)
            case "done", "succeeded":
                times["succeeded"] = at
            case "done", state:
                raise RuntimeError(f"job {job_id} has {state}: {event['data']['error']}")
    return job_id, times


def logged(text: str) -> Iterator[tuple[int, str, float]]:
    """Yield job, event and time from the worker's log."""
    names = {"started": "first line", "outcome": "runner's end"}
    for written, job_id, message in MESSAGE.findall(text):
        at = datetime.strptime(written, "%Y-%m-%d %H:%M:%S,%f").astimezone()
        yield int(job_id), names[message], at.timestamp()


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30, help="jobs that are measured")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    arguments = parser.parse_args(given)
    jobs: dict[int, dict[str, float]] = {}
    with started_service() as service:
        client = service.client()
        worker = service.start_worker(FLOPWATCH_LOG_LEVEL="DEBUG")
        for number in range(WARMUP + arguments.jobs):
            time.sleep(random.uniform(0, PAUSE_S))
            job_id, times = run_job(client, arguments.device)
            if number >= WARMUP:
                jobs[job_id] = times
        service.stop_processes(worker)
        for job_id, name, at in logged(service.logs()):
            if job_id in jobs:
                jobs[job_id][name] = at
    table = []
    for name, (start, end) in INTERVALS.items():
        samples = [1000 * (times[end] - times[start]) for times in jobs.values()]
        median, p95 = percentiles(samples, 50, 95, digits=0)
        table.append({"from → to": name, "median, ms": median, "p95, ms": p95, "most, ms": f"{max(samples):.0f}"})
    print_report(f"Overhead of a job, {arguments.jobs} jobs", table)


if __name__ == "__main__":
    main()
