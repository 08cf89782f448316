"""Shared by the benchmarks of the service: a started service, a client that costs little, and printed tables."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from app.store.database.sqlite import driver
from tools.service import Service

TIMEOUT_S = 600.0
TINY: dict[str, Any] = {
    "kind": "benchmark", "model": {"size": "tiny"}, "batch_size": 1, "context_length": 16, "mode": "forward",
    "warmup_steps": 0, "measure_steps": 1,
}  # fmt: skip
"""A small job: one forward pass."""

Row = Mapping[str, str]


@contextmanager
def started_service(folder: Path | None = None) -> Iterator[Service]:
    """Start a server in this folder or a temporary one; at the end its processes and the temporary folder are gone."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-")))
        service = stack.enter_context(Service(folder))
        service.start_server()
        yield service


@contextmanager
def connected(url: str) -> Iterator[http.client.HTTPConnection]:
    """Keep one connection to a server; it costs less processor time than httpx."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Send one request; return the answer's status and body.

    Raises:
        RuntimeError: the server met a fault.
    """
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    with connection.getresponse() as response:
        content = response.read()
    if response.status >= http.client.INTERNAL_SERVER_ERROR:
        raise RuntimeError(f"{method} {path}: {response.status}: {content.decode(errors='replace')[:500]}")
    return response.status, content


def server_of(service: Service) -> psutil.Process:
    """Return the process of a service's server."""
    assert service.server is not None
    return psutil.Process(service.server.pid)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds so far, user and system, of a process and all its descendants."""
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print the title, the host and a Markdown table, each row as soon as it is measured; the rows have equal keys."""
    print(f"\n{title}. {host()}\n")
    for number, row in enumerate(rows):
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(row.values())} |", flush=True)


def host() -> str:
    """Describe the processor and the versions that the figures depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else platform.machine()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("fastapi", "torch")]
    versions += [f"Python {platform.python_version()}", f"SQLite {driver().sqlite_version}"]
    return f"{os.cpu_count()} × {processor}; {', '.join(versions)}"


def percentiles(samples: Sequence[float], *wanted: int, digits: int = 1) -> list[str]:
    """Return the wanted percentiles (1 … 99) of two samples or more, by linear interpolation between them."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return [f"{cuts[percentile - 1]:.{digits}f}" for percentile in wanted]
