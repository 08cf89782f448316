"""The service's throughput, its event streams, the time that it adds to a job, and its CPU time without work.

    python -m benchmarks.service throughput | followers | overhead | idle
                                 [--postgresql postgresql+psycopg://user@host/postgres]

Each starts a server and, where it needs one, a worker of this checkout. With --postgresql the queue is in a database
that it makes and drops.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import httpx
import psutil
import typer

from benchmarks._shared import (
    TINY,
    Row,
    ask,
    connected,
    cpu_s,
    on,
    percentiles,
    print_table,
    server_of,
    spread,
    started_service,
)
from tools.service import Service, submit, wait_for_job

BODY = {"spec": TINY, "name": "benchmark", "labels": {"suite": "benchmarks"}}
WARMUP = 3
SETTLE_S = 2.0

commands = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)


@commands.command()
def throughput(
    clients: list[int] = [1, 4, 16],  # noqa: B006  (typer)
    seconds: float = 3.0,
    rounds: int = 3,
    postgresql: str | None = None,
) -> None:
    """Submissions per second by so many clients, each a process with one connection; median (least … greatest).

    Where the clients' CPU time per job is small and the processors are busy, the figure measures the server.
    """
    with started_service(postgresql) as service:
        _submit_together(service, 1, min(1.0, seconds))  # the first requests compile and fill caches
        title = f"Submissions over HTTP, {rounds} rounds of {seconds:g} s{on(postgresql)}"
        print_table(title, (_throughput(service, count, seconds, rounds) for count in clients))


def _throughput(service: Service, clients: int, seconds: float, rounds: int) -> Row:
    rates, server_ms, client_ms = zip(
        *(_submit_together(service, clients, seconds) for _ in range(rounds)), strict=True
    )
    return {
        "clients": str(clients),
        "jobs per second": spread(rates),
        "server, CPU ms per job": spread(server_ms, 2),
        "clients, CPU ms per job": spread(client_ms, 2),
    }


def _submit_together(service: Service, clients: int, seconds: float) -> tuple[float, float, float]:
    """Measure one round: jobs per second, and CPU milliseconds per job of the server and of the clients."""
    with multiprocessing.get_context("fork").Pool(clients) as pool:
        server = server_of(service)
        before = cpu_s(server)
        told = pool.starmap(_submit_for, [(service.url, seconds)] * clients, chunksize=1)
        server_s = cpu_s(server) - before
    firsts, lasts, client_s, jobs = zip(*told, strict=True)
    return sum(jobs) / (max(lasts) - min(firsts)), 1000 * server_s / sum(jobs), 1000 * sum(client_s) / sum(jobs)


def _submit_for(url: str, seconds: float) -> tuple[float, float, float, int]:
    """Submit for so many seconds; returns the first and the last moment, CPU seconds, and the number of jobs."""
    with connected(url) as connection:
        used, first, jobs = time.process_time(), time.monotonic(), 0
        while time.monotonic() < first + seconds:
            ask(connection, "POST", "/jobs", BODY)
            jobs += 1
    return first, time.monotonic(), time.process_time() - used, jobs


@commands.command()
def followers(streams: int = 500, rounds: int = 300, postgresql: str | None = None) -> None:
    """Latency of `POST /jobs` beside open event streams, each of a queued job of its own, and all of one job."""
    with started_service(postgresql) as service:
        client = service.client()
        ids = [submit(client, BODY) for _ in range(streams)]
        situations = {
            "none": [],
            f"{streams}, of as many jobs": ids,
            f"{streams}, of one job": ids[:1] * streams,
        }
        print_table(
            f"{rounds} jobs submitted one after the other{on(postgresql)}",
            (_beside_streams(service, title, followed, rounds) for title, followed in situations.items()),
        )


def _beside_streams(service: Service, title: str, job_ids: Sequence[int], rounds: int) -> Row:
    server, samples = server_of(service), []
    with ExitStack() as stack:
        streams = [stack.enter_context(_stream(service.url, job_id)) for job_id in job_ids]
        for stream in streams:
            _read_until(stream, b"event: ")
        connection = stack.enter_context(connected(service.url))
        before = cpu_s(server)
        for _ in range(rounds + WARMUP):
            start = time.perf_counter()
            ask(connection, "POST", "/jobs", BODY)
            samples.append(1000 * (time.perf_counter() - start))
        used_s = cpu_s(server) - before
        for stream in streams:
            stream.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # it is open, and idle
                _read_until(stream, b"")
    p50, p99 = percentiles(samples[WARMUP:], 50, 99)
    per_job = f"{1000 * used_s / len(samples):.1f}"
    return {"streams": title, "`POST /jobs` p50, ms": p50, "p99, ms": p99, "server, CPU ms per job": per_job}


def _stream(url: str, job_id: int) -> socket.socket:
    """Open an event stream of a job."""
    host, port = url.removeprefix("http://").split(":")
    stream = socket.create_connection((host, int(port)), timeout=60.0)
    head = f"GET /jobs/{job_id}/events HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n"
    stream.sendall(head.encode())
    return stream


def _read_until(stream: socket.socket, mark: bytes) -> None:
    received = b""
    while not received or mark not in received:
        piece = stream.recv(1 << 16)
        if not piece:
            raise RuntimeError("a stream has ended")
        received += piece


INTERVALS = {
    "submitted → claimed": ("submitted", "claimed"),
    "claimed → runner's first line": ("claimed", "started"),
    "**submitted → runner's first line, recorded**": ("submitted", "recorded"),
    "runner's first line → its end": ("started", "outcome"),
    "**runner's end → `succeeded`**": ("outcome", "succeeded"),
}
LOGGED = re.compile(r"^(\S+ \S+) DEBUG job=(\d+) attempt=\d+ message: (started|outcome)$", re.MULTILINE)


@commands.command()
def overhead(jobs: int = 30, device: str = "auto", postgresql: str | None = None) -> None:
    """The time that the service adds to a job: small jobs, one after the other, on a worker with a warm parent.

    Times are the wall clock's: of the client; in the job's events; and in the worker's log, to the millisecond, of the
    runner's first and last message. Stop other workers of the host: CPU jobs run alone.
    """
    times: dict[int, dict[str, float]] = {}
    with started_service(postgresql) as service:
        client = service.client()
        worker = service.start_worker(FLOPWATCH_LOG_LEVEL="DEBUG")
        for _ in range(WARMUP + jobs):
            time.sleep(random.uniform(0, 0.1))  # jobs must not keep step with a polling loop
            submitted = time.time()
            job_id = submit(client, {"spec": {**TINY, "device": device}})
            times[job_id] = {"submitted": submitted, **_events(client, job_id)}
        service.stop_processes(worker)
        for written, job, message in LOGGED.findall(service.logs()):
            at = datetime.strptime(written, "%Y-%m-%d %H:%M:%S,%f").astimezone()
            times[int(job)][message] = at.timestamp()
    print_table(f"Overhead of a job, {jobs} jobs{on(postgresql)}", _intervals(list(times.values())[WARMUP:]))


def _events(client: httpx.Client, job_id: int) -> dict[str, float]:
    """Wait for a job, and return when it was claimed, had its first line recorded and succeeded."""
    job = wait_for_job(client, job_id)
    if job["state"] != "succeeded":
        raise RuntimeError(f"job {job_id} has {job['state']}: {job['error']}")
    found: dict[str, float] = {}
    for event in client.get(f"/jobs/{job_id}/events").raise_for_status().json()["data"]:
        names = {("state", "running"): "claimed", ("progress", None): "recorded", ("done", "succeeded"): "succeeded"}
        name = names.get((event["type"], event["data"].get("state")))
        if name is not None:
            found.setdefault(name, datetime.fromisoformat(event["created_at"]).timestamp())
    return found


def _intervals(times: Sequence[dict[str, float]]) -> Iterator[Row]:
    for name, (start, end) in INTERVALS.items():
        samples = [1000 * (one[end] - one[start]) for one in times]
        median, p95 = percentiles(samples, 50, 95, digits=0)
        yield {"from → to": name, "median, ms": median, "p95, ms": p95, "most, ms": f"{max(samples):.0f}"}


@commands.command()
def idle(seconds: float = 60.0, queued: int = 10_000, postgresql: str | None = None) -> None:
    """CPU time of a server, and of a worker with its warm parent, that have nothing to do.

    The kernel counts CPU time in ticks of 10 ms, so measure for a minute.
    """
    with started_service(postgresql) as service:
        client = service.client()
        worker = service.start_worker(CUDA_VISIBLE_DEVICES="")
        wait_for_job(client, submit(client, BODY))  # a worker that has run a job has done all its late imports
        print_table(
            f"Idle, {seconds:g} s each{on(postgresql)}",
            _idle(service, client, psutil.Process(worker.pid), seconds, queued),
        )
        service.stop_processes(worker)


def _idle(service: Service, client: httpx.Client, worker: psutil.Process, seconds: float, queued: int) -> Iterator[Row]:
    processes = {"server": server_of(service), "worker": worker}

    def measure(situation: str) -> Row:
        time.sleep(SETTLE_S)
        start, before = time.monotonic(), [cpu_s(process) for process in processes.values()]
        time.sleep(seconds)
        took_s, after = time.monotonic() - start, [cpu_s(process) for process in processes.values()]
        shares = [100 * (end - begin) / took_s for begin, end in zip(before, after, strict=True)]
        columns = (f"{name}, % of a core" for name in processes)
        return {"situation": situation, **{name: f"{share:.2f}" for name, share in zip(columns, shares, strict=True)}}

    yield measure("empty queue")
    side = math.ceil(math.sqrt(queued))
    grid: dict[str, Any] = {"seed": list(range(side)), "warmup_steps": list(range(side))}
    sweep = client.post("/sweeps", json={"base": {**TINY, "device": "cuda"}, "grid": grid}).raise_for_status().json()
    yield measure(f"{side**2} jobs that it cannot run")
    first = client.get("/jobs", params={"sweep": sweep["id"], "limit": 1}).json()["data"][0]["id"]
    with _stream(service.url, first):
        yield measure("and a client that follows one")


if __name__ == "__main__":
    commands()
