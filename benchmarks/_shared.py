"""Shared by the benchmarks of the service: the cheapest client, many jobs at once, and the printed table."""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
from sqlalchemy import ColumnElement, Connection, Integer, Table, insert, literal, select
from tabulate import tabulate

from app.store import tables
from app.store.database.engine import Database
from app.store.database.sqlite import driver
from tools.service import Service, wait_for_job

JSON = {"Content-Type": "application/json"}
TIMEOUT_S = 60.0
BATCH = 10_000
"""Rows written in one transaction; a limit, so that the log of the database stays small."""
BELONGINGS = (tables.job_label, tables.attempt, tables.event, tables.measurement)
PACKAGES = ("fastapi", "torch")


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


def wait_for_success(client: httpx.Client, job_id: int, *, timeout_s: float) -> None:
    """Wait until the job has succeeded.

    Raises:
        RuntimeError: it ended otherwise.
    """
    job = wait_for_job(client, job_id, timeout_s=timeout_s)
    if job["state"] != "succeeded":
        raise RuntimeError(f"job {job_id} has {job['state']}: {job['error']}")


def copy_jobs(database: Database, job_id: int, copies: int) -> range:
    """Copy a job with its labels, attempts, events and measurements; returns the ids of the copies."""
    with database.read() as connection:
        last = connection.execute(select(tables.job.c.id).order_by(tables.job.c.id.desc()).limit(1)).scalar_one()
    ids = range(last + 1, last + 1 + copies)
    kept = [column for column in tables.job.c if column.name != "id"]
    for start in range(0, copies, BATCH):
        batch = ids[start : start + BATCH]
        number = select(literal(batch[0], Integer).label("id")).cte("number", recursive=True)
        number = number.union_all(select(number.c.id + 1).where(number.c.id < batch[-1]))
        rows = select(number.c.id, *kept).select_from(tables.job.join(number, literal(value=True)))
        copied = insert(tables.job).from_select(
            ["id", *(column.name for column in kept)], rows.where(tables.job.c.id == job_id)
        )
        with database.write() as connection:
            connection.execute(copied)
            copy_rows(connection, BELONGINGS, job_id, tables.job.c.id.between(batch[0], batch[-1]))
    database.checkpoint()
    return ids


def copy_rows(connection: Connection, of: Sequence[Table], job_id: int, which: ColumnElement[bool]) -> None:
    """Copy these tables' rows of a job for each job of the selection."""
    for table in of:
        kept = [column for column in table.c if column.name not in ("id", "job_id")]
        rows = select(tables.job.c.id, *kept).select_from(table.join(tables.job, literal(value=True)))
        names = ["job_id", *(column.name for column in kept)]
        connection.execute(insert(table).from_select(names, rows.where(table.c.job_id == job_id, which)))


def print_report(title: str, table: Sequence[dict[str, str]]) -> None:
    """Print the title, the host and the table, last and alone in its lines.

    Args:
        table: one dict per row, keyed by the column's heading; the rows have the same keys.
    """
    print(f"\n{title}. {host()}\n")
    print(tabulate(table, headers="keys", tablefmt="pipe", disable_numparse=True))


def print_now(row: Mapping[str, str]) -> None:
    """Print a row of the report as soon as it is measured: a run that is cut short has told what it found."""
    first, *others = row.items()
    print(f"{first[1]}: {', '.join(f'{heading} {value}' for heading, value in others)}", flush=True)


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
