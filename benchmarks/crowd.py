"""Counts the errors of listeners and pollers, and times `POST /jobs` beside them, while a sweep runs.

    python -m benchmarks.crowd [--postgresql postgresql+psycopg://user@host/postgres]

It starts a server and a worker. Each listener follows the events of one of the sweep's jobs, and of another one when
that has ended; once all listen, it measures. Each poller asks once a second for one of them, for the sweep, or for its
page. One client submits ten jobs a second, or fewer if they take longer. An error is an answer other than 200 or 201,
or a stream that ends before its job has.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event, Semaphore
from typing import Any
from urllib.parse import urlsplit

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
    started_service,
)
from tools.service import Service, wait_for_job

CONTEXT = multiprocessing.get_context("fork")
POLL_S = 1.0
SUBMIT_EVERY_S = 0.1
LATER = {"spec": TINY, "name": "benchmark", "priority": -1}
"""A job that runs after those of the sweep."""
POLLED = ("/jobs/{job}", "/sweeps/{sweep}", "/jobs?sweep={sweep}&limit=50", "/ui/sweeps/{sweep}")


@dataclass
class Crowd:
    """Clients of one process, and what they have met."""

    host: str
    port: int
    listening: Semaphore
    """Released by each stream that has begun or failed."""
    errors: list[str] = field(default_factory=list)
    events: int = 0
    polls_ms: list[float] = field(default_factory=list)

    async def run(self, sweep_id: int, job_ids: Sequence[int], listeners: int, pollers: int, ends: Event) -> None:
        """Be that many clients, until `ends` is set."""
        clients = [self._listen(job_ids[number::listeners]) for number in range(listeners)]
        clients += [self._poll(sweep_id, job_ids[number:], number / pollers) for number in range(pollers)]
        tasks = [asyncio.create_task(self._noting_errors(client)) for client in clients]
        await asyncio.to_thread(ends.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _noting_errors(self, client: Coroutine[Any, Any, None]) -> None:
        try:
            await client
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.errors.append(repr(error))
            self.listening.release()

    async def _listen(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            reader, writer = await self._ask(f"/jobs/{job_id}/events", {"Accept": "text/event-stream"})
            self.listening.release()
            try:
                last = b""
                while line := await reader.readline():
                    if line.startswith(b"event: "):
                        last = line.strip()
                        self.events += 1
                if last != b"event: done":
                    raise ValueError(f"the stream of job {job_id} ended after {last!r}")
            finally:
                writer.close()

    async def _poll(self, sweep_id: int, job_ids: Sequence[int], wait_s: float) -> None:
        await asyncio.sleep(wait_s * POLL_S)
        for job_id, path in zip(job_ids, itertools.cycle(POLLED), strict=False):
            begun = time.perf_counter()
            # A page refreshes itself so (htmx); without the header it would be a visit, which shares nothing.
            headers = {"HX-Request": "true"} if path.startswith("/ui") else {}
            reader, writer = await self._ask(path.format(job=job_id, sweep=sweep_id), headers)
            await reader.read()
            writer.close()
            self.polls_ms.append(1000 * (time.perf_counter() - begun))
            await asyncio.sleep(max(0.0, begun + POLL_S - time.perf_counter()))

    async def _ask(self, path: str, headers: Mapping[str, str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a GET, and read the head of its answer."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        sent = {"Host": self.host, "Connection": "close", **headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        status = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]
        if b" 200 " not in status:
            raise ValueError(f"GET {path}: {status!r}")
        return reader, writer


Told = tuple[list[str], int, list[float]]


def _be_crowd(
    crowd: Crowd,
    sweep_id: int,
    job_ids: Sequence[int],
    sizes: tuple[int, int],
    ends: Event,
    told: SimpleQueue[Told],
) -> None:
    asyncio.run(crowd.run(sweep_id, job_ids, *sizes, ends))
    told.put((crowd.errors, crowd.events, crowd.polls_ms))


def main(
    listeners: int = 200, pollers: int = 50, seconds: float = 30.0, jobs: int = 1000, postgresql: str | None = None
) -> None:
    """Measure without and with the crowd, SECONDS each. The sweep has JOBS jobs, which must last so long."""
    with started_service(postgresql) as service:
        rows = _measured(service, [(0, 0), (listeners, pollers)], seconds, jobs)
        print_table(f"`POST /jobs` while a sweep runs, {seconds:g} s each{on(postgresql)}", rows)


def _measured(service: Service, sizes: Sequence[tuple[int, int]], seconds: float, jobs: int) -> Iterator[Row]:
    client = service.client()
    worker = service.start_worker(CUDA_VISIBLE_DEVICES="")
    body = {"base": {**TINY, "device": "cpu"}, "grid": {"seed": list(range(jobs))}}
    for size in sizes:
        sweep_id = client.post("/sweeps", json=body).raise_for_status().json()["id"]
        newest = client.get("/jobs", params={"sweep": sweep_id, "limit": 1}).json()["data"][0]["id"]
        job_ids = range(newest - jobs + 1, newest + 1)
        wait_for_job(client, job_ids[0])
        yield _row(service, sweep_id, job_ids, size, seconds)
        client.post("/jobs/cancel", params={"state": "queued"}).raise_for_status()
    service.stop_processes(worker)


def _row(service: Service, sweep_id: int, job_ids: Sequence[int], size: tuple[int, int], seconds: float) -> Row:
    address = urlsplit(service.url)
    crowd = Crowd(address.hostname or "", address.port or 0, CONTEXT.Semaphore(0))
    ends, told = CONTEXT.Event(), CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=_be_crowd, args=(crowd, sweep_id, job_ids, size, ends, told))
    process.start()
    for _ in range(size[0]):
        crowd.listening.acquire()
    with connected(service.url) as connection:
        before, counts, begun = cpu_s(server_of(service)), _counts(connection, sweep_id), time.perf_counter()
        samples = list(_submissions(connection, seconds))
        used = (cpu_s(server_of(service)) - before) / (time.perf_counter() - begun)
        ended = _counts(connection, sweep_id)["succeeded"] - counts["succeeded"]
    ends.set()
    errors, events, polls_ms = told.get()
    process.join()
    if not ended:
        raise RuntimeError("no job of the sweep has ended meanwhile: give fewer --seconds, or more --jobs")
    for error in errors[:10]:
        typer.echo(error, err=True)
    return {
        "listeners, pollers": f"{size[0]}, {size[1]}",
        "`POST /jobs` p50 / p99 / most, ms": _milliseconds(samples),
        "submissions": str(len(samples)),
        "polls": str(len(polls_ms)),
        "polls p50 / p99 / most, ms": _milliseconds(polls_ms) if len(polls_ms) > 1 else "",
        "events": str(events),
        "errors": str(len(errors)),
        "jobs of the sweep that ended": str(ended),
        "server, % of a core": f"{100 * used:.0f}",
    }


def _submissions(connection: HTTPConnection, seconds: float) -> Iterator[float]:
    """Submit a job at each interval; yields how long each submission took, in milliseconds."""
    begun = time.perf_counter()
    for number in itertools.count():
        time.sleep(max(0.0, begun + number * SUBMIT_EVERY_S - time.perf_counter()))
        sent = time.perf_counter()
        if sent - begun > seconds and number > 1:  # a percentile needs two
            return
        status, content = ask(connection, "POST", "/jobs", LATER)
        if status != HTTPStatus.CREATED:
            raise RuntimeError(f"POST /jobs: {status}: {content.decode()}")
        yield 1000 * (time.perf_counter() - sent)


def _counts(connection: HTTPConnection, sweep_id: int) -> dict[str, int]:
    """Return the numbers of the sweep's jobs by state."""
    counts: dict[str, int] = json.loads(ask(connection, "GET", f"/sweeps/{sweep_id}")[1])["counts"]
    return counts


def _milliseconds(samples: Sequence[float]) -> str:
    return " / ".join([*percentiles(samples, 50, 99), f"{max(samples):.1f}"])


if __name__ == "__main__":
    typer.run(main)
