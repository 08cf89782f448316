"""Latency of `POST /jobs` beside idle event streams: `python -m benchmarks.sse_streams`.

A real server, without a worker. Clients follow jobs that wait, over plain sockets with server-sent events, and only
read; another client submits jobs one after the other, over one connection. Two situations for each number of streams:
every stream follows a job of its own, and all of them follow the same job.
"""

from __future__ import annotations

import argparse
import json
import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from benchmarks._shared import Loopback, percentiles, print_report, started_service
from tools.service import Service, submit

BODY: dict[str, Any] = {"spec": {"kind": "benchmark", "model": {"size": "tiny"}}}
CONNECT_TIMEOUT_S = 60.0
SPARE_FILES = 100
WARMUP = 10


class Streams:
    """Open event streams. A thread reads what comes and counts the events of each."""

    def __init__(self, url: str, job_ids: list[int]) -> None:
        self._address = urlsplit(url)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._read, name="streams")
        self._closing = False
        self.events = [0] * len(job_ids)
        self.ended = 0
        for number, job_id in enumerate(job_ids):
            self._selector.register(self._open(job_id), selectors.EVENT_READ, number)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def wait_for_first_events(self) -> None:
        """Wait until each stream has told that its job is queued. Raises TimeoutError."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not all(self.events):
            if time.monotonic() > deadline or self.ended:
                raise TimeoutError(f"{self.events.count(0)} streams have no event, {self.ended} have ended")
            time.sleep(0.01)

    def _open(self, job_id: int) -> socket.socket:
        connection = socket.create_connection((self._address.hostname, self._address.port), CONNECT_TIMEOUT_S)
        head = (
            f"GET /jobs/{job_id}/events HTTP/1.1\r\nHost: {self._address.netloc}\r\nAccept: text/event-stream\r\n\r\n"
        )
        connection.sendall(head.encode())
        return connection

    def _read(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.1):
                received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                self.events[key.data] += received.count(b"event: ")
                if not received:
                    self._selector.unregister(key.fileobj)
                    self.ended += 1


def time_submissions(url: str, rounds: int) -> list[float]:
    """Return the milliseconds that each submission took."""
    body, samples = json.dumps(BODY).encode(), []
    with Loopback(url) as client:
        for number in range(WARMUP + rounds):
            start = time.perf_counter()
            client.post("/jobs", body)
            if number >= WARMUP:
                samples.append(1000 * (time.perf_counter() - start))
    return samples


def measure(service: Service, title: str, job_ids: list[int], rounds: int) -> dict[str, str]:
    """Time submissions while each of these jobs is followed; return a row of the table."""
    assert service.server is not None
    server = psutil.Process(service.server.pid)
    with ExitStack() as stack:
        if job_ids:
            streams = stack.enter_context(Streams(service.url, job_ids))
            streams.wait_for_first_events()
        before = server.cpu_times()
        samples = time_submissions(service.url, rounds)
        after = server.cpu_times()
        if job_ids and streams.ended:
            raise RuntimeError(f"{streams.ended} streams ended meanwhile")
    cpu_ms = 1000 * (after.user + after.system - before.user - before.system) / (rounds + WARMUP)
    p50, p99 = percentiles(samples, 50, 99)
    return {
        "streams": title,
        "`POST /jobs` p50, ms": p50,
        "p99, ms": p99,
        "server, CPU ms per job": f"{cpu_ms:.1f}",
        "server, MiB": f"{server.memory_info().rss / 2**20:.0f}",
    }


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500, help="streams open at once")
    parser.add_argument("--rounds", type=int, default=300, help="jobs submitted in each situation")
    arguments = parser.parse_args(given)
    count = arguments.streams
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, min(most, 2 * count + SPARE_FILES)), most))
    with started_service() as service:
        client = service.client()
        ids = [submit(client, BODY) for _ in range(count)]
        table = [
            measure(service, "none", [], arguments.rounds),
            measure(service, f"{count}, of as many jobs", ids, arguments.rounds),
            measure(service, f"{count}, of one job", ids[:1] * count, arguments.rounds),
        ]
    print_report(f"{arguments.rounds} jobs submitted one after the other", table)


if __name__ == "__main__":
    main()
