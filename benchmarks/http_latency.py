"""Latency of the most used routes, with a full database: `python -m benchmarks.http_latency`.

A real job is run and copied into 100 000 finished and 10 000 queued ones. Then one client with one connection sends
requests to the server, without a worker; the routes take turns, so that a disturbance of the host meets all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from app.errors import job_problem
from app.store.engine import open_database
from benchmarks._shared import Loopback, copy_job, percentiles, print_report, started_service
from tools.service import Service, submit, wait_for_job

TINY = {
    "kind": "benchmark",
    "model": {"size": "tiny"},
    "batch_size": 1,
    "context_length": 32,
    "warmup_steps": 1,
    "measure_steps": 10,
}
BODY: dict[str, Any] = {"spec": TINY, "name": "latency", "labels": {"suite": "nightly"}}
SUITES = 20
WARMUP = 5


def fill(service: Service, finished: int, queued: int) -> range:
    """Run a job, stop the worker and copy the job; returns the ids of the finished copies."""
    client = service.client()
    worker = service.start_worker()
    done = wait_for_job(client, submit(client, BODY))
    if done["state"] != "succeeded":
        raise RuntimeError(f"the job to copy has {done['state']}: {done['error']}")
    service.stop_processes(worker)
    waiting = submit(client, BODY)
    with contextlib.closing(open_database(service.settings())) as database:
        ids = copy_job(database, done["id"], finished, as_finished, measured_every=10)
        copy_job(database, waiting, queued, labels)
    return ids


def labels(job_id: int) -> dict[str, Any]:
    """Return a label that all copies have, one that many share, and one that no other job has."""
    return {"labels": {"team": "all", "suite": f"suite-{job_id % SUITES}", "run": f"run-{job_id}"}}


def as_finished(job_id: int) -> dict[str, Any]:
    """Let 1 copy in 20 have failed; the others end as the original."""
    error = job_problem("timeout", "the job ran longer than its timeout_s, 60 s", log_head="", log_tail="")
    return labels(job_id) | ({"state": "failed", "error": error} if job_id % SUITES == 7 else {})


def requests(client: Loopback, ids: range) -> dict[str, Callable[[int], bytes]]:
    """Return the requests to time, by name; each is a function of the number of the round."""
    body = json.dumps(BODY).encode()
    oldest, middle = ids[0], ids[len(ids) // 2]
    return {
        "`POST /jobs`": lambda _round: client.post("/jobs", body),
        "`GET /jobs/{id}`": lambda number: client.get(f"/jobs/{ids[(number * 7919) % len(ids)]}"),
        "`GET /jobs`": lambda _round: client.get("/jobs"),
        "`GET /jobs?after=…`, in the middle": lambda _round: client.get(f"/jobs?after={middle}"),
        "`GET /jobs?state=queued`": lambda _round: client.get("/jobs?state=queued"),
        "`GET /jobs?state=succeeded`": lambda _round: client.get("/jobs?state=succeeded"),
        "`GET /jobs?state=running`, none": lambda _round: client.get("/jobs?state=running"),
        "`GET /jobs?kind=benchmark&state=failed`": lambda _round: client.get("/jobs?kind=benchmark&state=failed"),
        "`GET /jobs?label=…`, all": lambda _round: client.get("/jobs?label=team:all"),
        "`GET /jobs?label=…`, 1 in 20": lambda _round: client.get("/jobs?label=suite:suite-3"),
        "`GET /jobs?label=…`, the oldest alone": lambda _round: client.get(f"/jobs?label=run:run-{oldest}"),
        "`GET /jobs?label=…&state=failed`": lambda _round: client.get("/jobs?label=suite:suite-7&state=failed"),
        "`GET /jobs/{id}/measurements`": lambda number: client.get(
            f"/jobs/{ids[(number * 10) % len(ids)]}/measurements"
        ),
        "`GET /metrics`": lambda _round: client.get("/metrics"),
    }


def time_requests(client: Loopback, ids: range, rounds: int) -> list[dict[str, str]]:
    """Time the requests, and return the rows of the table."""
    routes = requests(client, ids)
    samples: dict[str, list[float]] = {name: [] for name in routes}
    answers: dict[str, bytes] = {}
    for number in range(WARMUP + rounds):
        for name, send in routes.items():
            start = time.perf_counter()
            answers[name] = send(number)
            if number >= WARMUP:
                samples[name].append(1000 * (time.perf_counter() - start))
    table = []
    for name, times in samples.items():
        p50, p99 = percentiles(times, 50, 99)
        kib = len(answers[name]) / 1024
        table.append({"request": name, "p50, ms": p50, "p99, ms": p99, "answer, KiB": f"{kib:.1f}"})
    return table


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finished", type=int, default=100_000, help="finished jobs in the database")
    parser.add_argument("--queued", type=int, default=10_000, help="queued jobs in the database")
    parser.add_argument("--rounds", type=int, default=300, help="times that each request is sent")
    arguments = parser.parse_args(given)
    with started_service() as service:
        ids = fill(service, arguments.finished, arguments.queued)
        with Loopback(service.url) as client:
            table = time_requests(client, ids, arguments.rounds)
    print_report(
        f"{arguments.rounds} times each, with {arguments.finished} finished and {arguments.queued} queued jobs", table
    )


if __name__ == "__main__":
    main()
