"""Shared by the benchmarks of the service: the cheapest client, many jobs at once, and the printed table."""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from sqlalchemy import Connection, Table, insert, select
from tabulate import tabulate

from app.store import tables
from app.store.engine import Database
from app.store.sqlite import driver
from tools.service import Service

JSON = {"Content-Type": "application/json"}
TIMEOUT_S = 60.0
BATCH = 1000
"""Copies in one transaction; a limit, so that other writers do not wait for long."""
BELONGINGS = (tables.attempt, tables.event, tables.measurement)
PACKAGES = ("fastapi", "torch")

Change = Callable[[int], dict[str, Any]]


@contextmanager
def started_service() -> Iterator[Service]:
    """A service in a temporary folder whose server runs. At the end its processes and the folder are gone."""
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder, Service(Path(folder)) as service:
        service.start_server()
        yield service


class Loopback:
    """Requests to a server on this host, one after the other, over one kept connection.

    Its own cost is small, so that figures measure the server and not the client.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        self._connection.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def get(self, path: str) -> bytes:
        """Return the body of the answer.

        Raises:
            RuntimeError: the status was not 200.
        """
        return self._request("GET", path, None, http.client.OK)

    def post(self, path: str, body: bytes) -> bytes:
        """Send a JSON body; return the body of the answer.

        Raises:
            RuntimeError: the status was not 201.
        """
        return self._request("POST", path, body, http.client.CREATED)

    def _request(self, method: str, path: str, body: bytes | None, expected: int) -> bytes:
        self._connection.request(method, path, body, JSON if body is not None else {})
        with self._connection.getresponse() as response:
            answer = response.read()
            if response.status != expected:
                raise RuntimeError(f"{method} {path}: {response.status}: {answer.decode(errors='replace')}")
        return answer


def copy_job(database: Database, job_id: int, copies: int, change: Change, *, measured_every: int = 1) -> range:
    """Copy a job with its labels, attempts and events, and its measurements for every `measured_every`th copy.

    `change` returns the columns of the table `job` in which the copy with a given id differs; all other columns, times
    included, are copied. Returns the ids of the copies.
    """
    with database.read() as connection:
        row = connection.execute(select(tables.job).where(tables.job.c.id == job_id)).mappings().one()
        belongings = {table: _belonging_to(connection, job_id, table) for table in BELONGINGS}
        last = connection.execute(select(tables.job.c.id).order_by(tables.job.c.id.desc()).limit(1)).scalar_one()
    ids = range(last + 1, last + 1 + copies)
    for start in range(0, copies, BATCH):
        batch = ids[start : start + BATCH]
        with database.write() as connection:
            jobs = [{**row, "id": copy, **change(copy)} for copy in batch]
            _insert(connection, tables.job, jobs)
            _insert(connection, tables.job_label, list(_labels(jobs)))
            for table, rows in belongings.items():
                owners = batch[::measured_every] if table is tables.measurement else batch
                _insert(connection, table, [{**one, "job_id": owner} for owner in owners for one in rows])
    database.checkpoint()
    return ids


def _belonging_to(connection: Connection, job_id: int, table: Table) -> list[dict[str, Any]]:
    rows = connection.execute(select(table).where(table.c.job_id == job_id).order_by(table.c.id)).mappings()
    return [{name: value for name, value in row.items() if name != "id"} for row in rows]


def _labels(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for job in jobs:
        for key, value in job["labels"].items():
            yield {"job_id": job["id"], "key": key, "value": value}


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


def print_report(title: str, table: Sequence[dict[str, str]]) -> None:
    """Print the title, the host and the table, last and alone in its lines.

    Args:
        table: one dict per row, keyed by the column's heading; the rows have the same keys.
    """
    print(f"\n{title}. {host()}\n")
    print(tabulate(table, headers="keys", tablefmt="pipe", disable_numparse=True))


def host() -> str:
    """Describe the processor and the versions that the figures depend on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    sqlite = f"SQLite {driver().sqlite_version}"
    return f"{os.cpu_count()} × {_processor()}; " + ", ".join(
        [f"Python {platform.python_version()}", sqlite, *versions]
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def spread(samples: Sequence[float], digits: int = 0) -> str:
    """Write the median, and in brackets the least and the greatest: "412 (398 … 420)"."""
    median = statistics.median(samples)
    return f"{median:.{digits}f} ({min(samples):.{digits}f} … {max(samples):.{digits}f})"


def percentiles(samples: Sequence[float], *wanted: int, digits: int = 1) -> list[str]:
    """Return the wanted percentiles (1 … 99) of two samples or more, by linear interpolation between them."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return [f"{cuts[percentile - 1]:.{digits}f}" for percentile in wanted]
