"""The cost of tables by their size: `python -m benchmarks.tables`.

The database is that of `benchmarks.latencies`: 100 000 finished jobs with a million measurements. Beside them are jobs
with 1 000, 10 000 and 100 000 numbers, ten of each case. One client asks for their tables in every format, and for that
of all jobs together, which the server streams; for the latter the script also prints when the first bytes arrived. Each
row is printed as it is measured, and all of them at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from sqlalchemy import insert

from app import results
from app.layout import FORMATS
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database, open_database
from app.store.queue.transitions import Queue
from app.store.records import NewJob
from benchmarks._filling import (
    BODY,
    CELL_METRICS,
    TIMEOUT_S,
    Size,
    attempt_row,
    fill,
    finish_jobs,
    insert_cells,
)
from benchmarks._shared import print_now, print_report, started_service
from benchmarks.latencies import SIDE, Client, Request, at, measure
from tools.service import submit

NUMBERS = (1_000, 10_000, 100_000)
"""Numbers in the tables of the jobs that are added: cases times metrics."""
ASKED = {
    "JSON": "format=json",
    "CSV": "format=csv",
    "Markdown": "format=markdown",
    "LaTeX": "format=latex",
    "HTML": "format=html",
    "page of 50, sorted": "format=json&sort=-metric_0&limit=50",
    "pivoted": "format=json&pivot=head_dim&columns=all",
    "relative": "format=json&relative_to=head_dim=64&columns=metric_0",
}
CHUNK = 1 << 16


def add_jobs(database: Database, jobs: Sequence[int]) -> None:
    """Let these jobs finish, with as many numbers as NUMBERS says."""
    with database.write() as connection:
        finish_jobs(connection, tables.job.c.id.in_(jobs))
        connection.execute(insert(tables.attempt), [attempt_row(job) for job in jobs])
    for job, count in zip(jobs, NUMBERS, strict=True):
        insert_cells(database, job, count)


def stream(url: str, path: str, server: psutil.Process) -> dict[str, str]:
    """Read a table as it comes; returns a row of the second table."""
    address = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port, TIMEOUT_S)) as connection:
        begin = time.perf_counter()
        connection.request("GET", path)
        size, first, most = 0, None, 0
        with connection.getresponse() as response:
            while chunk := response.read(CHUNK):
                first = first if first is not None else time.perf_counter() - begin
                size += len(chunk)
                most = max(most, server.memory_info().rss)
            status = response.status
        total = time.perf_counter() - begin
    return {
        "request": f"`GET {path}`",
        "status": str(status),
        "first bytes, s": f"{first or 0:.1f}",
        "all, s": f"{total:.1f}",
        "answer, MiB": f"{size / 2**20:.0f}",
        "server at most, MiB": f"{most / 2**20:.0f}",
    }


def run(size: Size, rounds: int, budget_s: float) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Fill a database and time the tables; returns both tables of figures."""
    with started_service() as service:
        client = service.client()
        with contextlib.closing(open_database(service.settings())) as database:
            filled = fill(database, client, size)
            jobs = [submit(client, BODY) for _ in NUMBERS]
            add_jobs(database, jobs)
        assert service.server is not None
        server = psutil.Process(service.server.pid)
        rows = []
        with contextlib.closing(Client(service.url)) as asking:
            for job, count in zip(jobs, NUMBERS, strict=True):
                for title, query in ASKED.items():
                    request = Request(
                        "GET /tables", at(f"/tables?job={job}&{query}"), title=f"{count} numbers, {title}"
                    )
                    rows.append(measure(asking, server, request, rounds, budget_s))
                    print_now(rows[-1])
            path = f"/tables?sweep={filled.sweep}"
            rows.append(measure(asking, server, Request("GET /tables", at(path), title="the sweep"), rounds, budget_s))
            print_now(rows[-1])
        streamed = []
        for name in ("json", "csv"):
            streamed.append(stream(service.url, f"/tables?kind=benchmark&format={name}", server))
            print_now(streamed[-1])
    return rows, streamed


def costs(rounds: int) -> list[dict[str, str]]:
    """Make tables in this process, without a server; returns the processor's time that each step takes.

    Unlike the time that a client waits, it does not depend on what else the host does.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        database = open_database(Settings(data_dir=Path(folder)))
        queue = Queue(database)
        jobs = [int(queue.submit(NewJob(BenchmarkSpec())).response["id"]) for _ in NUMBERS]
        add_jobs(database, jobs)
        for job, count in zip(jobs, NUMBERS, strict=True):
            row = {"numbers": str(count)}
            sheet, row["made, ms"] = _cost(functools.partial(results.table, database, jobs=[job]), rounds)
            for name in FORMATS:
                _, row[f"{name}, ms"] = _cost(functools.partial(results.render, sheet, name), rounds)
            choice = results.Choice(jobs=[job])
            _, row["streamed as CSV, ms"] = _cost(functools.partial(_all, database, choice), rounds)
            print_now(row)
            rows.append(row)
        database.close()
    return rows


def _all(database: Database, choice: results.Choice) -> int:
    return sum(len(piece) for piece in results.stream(database, "csv", choice))


def _cost(work: Callable[[], Any], rounds: int) -> tuple[Any, str]:
    """Return what the work gives, and the least processor time of several rounds in ms."""
    found, best = None, math.inf
    for _ in range(rounds):
        begin = time.process_time()
        found = work()
        best = min(best, time.process_time() - begin)
    return found, f"{1000 * best:.0f}"


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finished", type=int, default=100_000, help="finished jobs in the database")
    parser.add_argument("--measurements", type=int, default=1_000_000, help="measurements of all jobs")
    parser.add_argument("--large", type=int, default=150_000, help="measurements of the large job")
    parser.add_argument("--side", type=int, default=SIDE, help="the sweep has as many jobs as this number squared")
    parser.add_argument("--rounds", type=int, default=20, help="times that each request is sent")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds after which a request is sent no more")
    parser.add_argument(
        "--cpu", action="store_true", help="only the processor's time, in this process, without a server"
    )
    arguments = parser.parse_args(given)
    if arguments.cpu:
        title = f"Processor time of tables by their numbers, {CELL_METRICS} of each case; least of {arguments.rounds}"
        print_report(title, costs(arguments.rounds))
        return
    size = Size(arguments.finished, 1, arguments.measurements, arguments.side, arguments.large)
    rows, streamed = run(size, arguments.rounds, arguments.budget)
    print_report(f"With {size.finished} finished jobs and {size.measurements} measurements, streamed", streamed)
    print_report(f"Tables of one job by their numbers, {CELL_METRICS} of each case", rows)


if __name__ == "__main__":
    main()
