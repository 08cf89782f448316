"""Submissions per second over HTTP: `python -m benchmarks.http_throughput`.

The server runs without a worker; 1, 4 and 16 clients on the loopback, each a process, send the same body again and
again over one kept connection. The table also shows the CPU time of both sides per job: where the clients' share is
small and the processors are busy, the figure measures the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import psutil

from benchmarks._shared import Loopback, print_report, spread, started_service
from tools.service import Service

BODY = {
    "spec": {"kind": "benchmark", "model": {"size": "small"}, "context_length": 256},
    "name": "throughput",
    "labels": {"suite": "throughput"},
}
START_TIMEOUT_S = 120.0


def submit(url: str, seconds: float, most: int, start: Barrier, answers: Connection) -> None:
    """Run one client: submit for `seconds` s, `most` jobs at most; sends back (first, last, CPU seconds, jobs)."""
    body = json.dumps(BODY).encode()
    with Loopback(url) as client:
        start.wait(START_TIMEOUT_S)
        cpu_s, first, jobs = time.process_time(), time.monotonic(), 0
        while jobs < most and time.monotonic() < first + seconds:
            client.post("/jobs", body)
            jobs += 1
    answers.send((first, time.monotonic(), time.process_time() - cpu_s, jobs))


def measure(service: Service, clients: int, seconds: float, most: int) -> tuple[float, float, float]:
    """Measure one round: jobs per second, and CPU milliseconds per job of the server and of the clients."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(clients + 1)
    pipes = [context.Pipe(duplex=False) for _ in range(clients)]
    processes = [
        context.Process(target=submit, args=(service.url, seconds, most, start, answers), daemon=True)
        for _, answers in pipes
    ]
    for process in processes:
        process.start()
    for _, answers in pipes:
        answers.close()  # only the clients keep it open: when one dies, reading its answer ends with EOFError
    assert service.server is not None
    server = psutil.Process(service.server.pid)
    start.wait(START_TIMEOUT_S)
    before = server.cpu_times()
    told = [received.recv() for received, _ in pipes]
    after = server.cpu_times()
    for process in processes:
        process.join()
    firsts, lasts, cpu_s, jobs = zip(*told, strict=True)
    server_s = after.user + after.system - before.user - before.system
    return sum(jobs) / (max(lasts) - min(firsts)), 1000 * server_s / sum(jobs), 1000 * sum(cpu_s) / sum(jobs)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="numbers of concurrent clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each number of clients")
    parser.add_argument("--most", type=int, default=20_000, help="jobs that one client submits in a round at the most")
    arguments = parser.parse_args(given)
    table = []
    with started_service() as service:
        measure(service, 1, min(1.0, arguments.seconds), arguments.most)  # the first requests compile and fill caches
        for clients in arguments.clients:
            rounds = [measure(service, clients, arguments.seconds, arguments.most) for _ in range(arguments.rounds)]
            rates, server_ms, client_ms = zip(*rounds, strict=True)
            table.append(
                {
                    "clients": str(clients),
                    "jobs per second": spread(rates),
                    "server, CPU ms per job": spread(server_ms, 2),
                    "clients, CPU ms per job": spread(client_ms, 2),
                }
            )
    rounds_said = f"{arguments.rounds} rounds of {arguments.seconds:g} s"
    print_report(f"Submissions over HTTP: median (least … greatest) of {rounds_said}", table)


if __name__ == "__main__":
    main()
