"""Hours of mixed work beside killed workers and a restarted server: is every accepted job ended once, and memory flat?

    python -m benchmarks.soak [--seconds 1800] [--postgresql URL]

Every 20 s a worker is killed and another one started, every minute the server is restarted; one worker is never killed,
so that its memory can be followed. The exit code is 1 if a job was lost, ended twice or did not end, or if the server
or that worker grew.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import typer

from benchmarks._shared import TINY, Row, host, print_table
from tools.service import FINAL_STATES, Service
from tools.waiting import wait_until

Process = subprocess.Popen[bytes]
MIB = float(1 << 20)
UNAVAILABLE = 503
POLL_S = 0.1
ENVIRONMENT = {"FLOPWATCH_LEASE_S": "5", "FLOPWATCH_GRACE_S": "1", "OMP_NUM_THREADS": "1"}
JOBS: tuple[dict[str, Any], ...] = (
    {"spec": {**TINY, "device": "cpu"}},
    {"spec": {**TINY, "device": "cpu", "mode": "train_step", "measure_steps": 3}},
    {"spec": {"kind": "estimate", "model": {"size": "small"}}},
    {"spec": {"kind": "memory", "model": {"size": "tiny"}, "context_length": 16, "batch_size": 1, "device": "cpu"}},
    {"spec": {**TINY, "device": "cpu", "context_length": 16, "d_model": None}},  # refused: 422 is an answer, too
)
"""What is submitted, at random; jobs are started again however often their worker is killed."""


@dataclass(frozen=True)
class Plan:
    """How long, and how rough. Times in seconds."""

    seconds: float = 1800.0
    kill_every: float = 20.0
    restart_every: float = 60.0
    workers: int = 2
    in_flight: int = 20
    """The most unfinished jobs."""
    drain: float = 300.0
    """The time that the last jobs have to end."""
    jobs: Sequence[Mapping[str, Any]] = JOBS


@dataclass
class Soak:
    """What happened."""

    accepted: list[int] = field(default_factory=list)
    refused: int = 0
    killed: int = 0
    restarted: int = 0
    memory: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds since the start, MiB of the server, MiB of the worker that is never killed."""
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def soak(service: Service, plan: Plan, rng: random.Random) -> Soak:
    """Run the plan against a service that is not started yet."""
    seen, stop = Soak(), threading.Event()
    service.start_server()
    steady = service.start_worker()
    others = [_worker(service) for _ in range(plan.workers - 1)]
    submitter = threading.Thread(target=_keep_submitting, args=(service.url, plan, rng, seen, stop))
    submitter.start()
    try:
        _disturb(service, plan, seen, steady, others)
    finally:
        stop.set()
        submitter.join()
    _judge(service, plan, seen)
    return seen


def _disturb(service: Service, plan: Plan, seen: Soak, steady: Process, others: list[Process]) -> None:
    """Kill workers, restart the server and read their memory for the plan's time."""
    start = time.monotonic()
    next_kill, next_restart, next_sample = plan.kill_every, plan.restart_every, 0.0
    while (now := time.monotonic() - start) < plan.seconds:
        assert service.server is not None
        if now >= next_kill and others:
            next_kill += plan.kill_every
            victim = others.pop(0)
            victim.kill()
            victim.wait()
            seen.killed += 1
            others.append(_worker(service))
        if now >= next_restart:
            next_restart += plan.restart_every
            service.stop_processes(service.server)
            service.start_server()
            seen.restarted += 1
        if now >= next_sample:
            next_sample += max(0.5, plan.seconds / 300)
            seen.memory.append((now, _rss_mib(service.server.pid), _rss_mib(steady.pid)))
        time.sleep(POLL_S)


def _keep_submitting(url: str, plan: Plan, rng: random.Random, seen: Soak, stop: threading.Event) -> None:
    """Submit jobs, some at a time. While the server is away, the same request is sent again."""
    open_jobs: set[int] = set()
    body, number = None, 0
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False, verify=False) as client:
        while not stop.is_set():
            try:
                if len(open_jobs) >= plan.in_flight:
                    open_jobs = {job for job in open_jobs if _job(client, job)["state"] not in FINAL_STATES}
                    stop.wait(POLL_S)
                    continue
                body = body or dict(rng.choice(plan.jobs))
                job = _submit(client, body, f"soak-{number}")
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != UNAVAILABLE:
                    seen.wrong.append(f"the server answered {error.response.status_code}: {error.response.text[:200]}")
                stop.wait(POLL_S)
                continue
            body, number = None, number + 1
            if job is None:
                seen.refused += 1
            else:
                seen.accepted.append(job)
                open_jobs.add(job)


def _worker(service: Service) -> Process:
    """Start a worker without waiting until it is ready."""
    return service.start_process("worker", ["workers", "agent"])[0]


def _submit(client: httpx.Client, body: dict[str, Any], key: str) -> int | None:
    """Submit a job; None if it is refused. With its key it can be sent again until there is an answer."""
    answer = client.post("/jobs", json={**body, "max_attempts": 100}, headers={"Idempotency-Key": key})
    if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        return None
    return int(answer.raise_for_status().json()["id"])


def _job(client: httpx.Client, job: int) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"/jobs/{job}").raise_for_status().json()
    return answer


def _has_ended(client: httpx.Client, job: int) -> bool:
    return _job(client, job)["state"] in FINAL_STATES


def _rss_mib(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).memory_info().rss / MIB)
    return 0.0


def _judge(service: Service, plan: Plan, seen: Soak) -> None:
    """Wait for the last jobs, and look at how often each has ended."""
    with httpx.Client(base_url=service.url, timeout=30.0, trust_env=False, verify=False) as client:
        deadline = time.monotonic() + plan.drain
        for job in seen.accepted:
            with suppress(TimeoutError):
                left_s = max(0.1, deadline - time.monotonic())
                wait_until(partial(_has_ended, client, job), f"job {job}", left_s)
            state = _job(client, job)["state"]
            seen.ends[state] += 1
            events = client.get(f"/jobs/{job}/events", params={"limit": 500}).raise_for_status().json()["data"]
            attempts = client.get(f"/jobs/{job}/attempts").raise_for_status().json()["data"]
            ends = sum(event["type"] == "done" for event in events)
            won = sum(attempt["state"] == state for attempt in attempts)
            if state != "succeeded" or ends != 1 or won != 1:
                seen.wrong.append(f"job {job} is {state}, ended {ends} times, in {won} attempts")
    if len(set(seen.accepted)) != len(seen.accepted):
        seen.wrong.append("two requests with different keys got one job")


def growth(samples: Sequence[float]) -> float:
    """Return the median of the last third less that of the first third after the warm-up, which is a tenth."""
    warm = samples[len(samples) // 10 :]
    third = max(1, len(warm) // 3)
    return statistics.median(warm[-third:]) - statistics.median(warm[:third])


def main(
    seconds: float = 1800.0,
    kill_every: float = 20.0,
    restart_every: float = 60.0,
    workers: int = 2,
    postgresql: str = "",
    seed: int = 1,
    max_growth_mib: float = 32.0,
) -> None:
    """Soak a Flopwatch of this checkout, on SQLite or an empty PostgreSQL database."""
    plan = Plan(seconds, kill_every, restart_every, workers)
    environment = {**ENVIRONMENT, **({"FLOPWATCH_DATABASE_URL": postgresql} if postgresql else {})}
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder, Service(Path(folder), environment) as service:
        service.environment["TMPDIR"] = folder
        seen = soak(service, plan, random.Random(seed))
    step = max(1, len(seen.memory) // 15)
    rows: list[Row] = [
        {"minutes": f"{at / 60:.1f}", "server, MiB": f"{server:.0f}", "worker, MiB": f"{worker:.0f}"}
        for at, server, worker in seen.memory[::step]
    ]
    print_table(f"Memory, {'PostgreSQL' if postgresql else 'SQLite'}", rows)
    grown = {name: growth([one[at] for one in seen.memory]) for at, name in ((1, "server"), (2, "worker"))}
    print(f"\n{len(seen.accepted)} jobs accepted, {seen.refused} refused; ends: {dict(seen.ends)}")
    print(f"{seen.killed} workers killed, {seen.restarted} restarts of the server; {host()}")
    print("growth: " + ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in grown.items()))
    seen.wrong += [f"the {name} grew by {mib:.0f} MiB" for name, mib in grown.items() if mib > max_growth_mib]
    print("\n".join(seen.wrong) or "nothing wrong")
    raise typer.Exit(1 if seen.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
