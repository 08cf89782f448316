"""The scripts behind the service's figures run, with few jobs, and end with a table of numbers.

One is started as a user does. The others run in this process, on one server that they share.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import idle_cpu, job_overhead, latencies, sse_streams
from benchmarks.finish_memory import finish
from tests.forked import ForkedService
from tools.service import Service

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
NUMBER = re.compile(r"\d+(\.\d+)?( \(\d+(\.\d+)? … \d+(\.\d+)?\))?")
"""412, or 412 (398 … 420)."""

pytestmark = pytest.mark.acceptance

Table = tuple[list[str], list[list[str]]]


def environment(folder: Path) -> dict[str, str]:
    """Of the scripts' processes: with tests/plugins, and `folder` for temporary files and the workers' locks."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "plugins")])
    return {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The server that the scripts share."""
    folder = tmp_path_factory.mktemp("figures")
    with ForkedService(folder / "service", environment(folder)) as service:
        service.start_server()
        yield service


@pytest.fixture
def table(
    running: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Table]]:
    """Run a script on the shared server. At the end nothing waits, so that no script's worker runs another's jobs."""

    def run(script: ModuleType, *arguments: str) -> Table:
        monkeypatch.setattr(script, "started_service", lambda: contextlib.nullcontext(running))
        script.main(arguments)
        return parsed(capsys.readouterr().out)

    yield run
    client: Any = running.client()
    client.post("/jobs/cancel", params={"state": "queued"}).raise_for_status()
    running.stop_processes(*(process for process in running.processes if process is not running.server))


def parsed(output: str) -> Table:
    """The headings and the rows of the table that the benchmark prints last."""
    title, _, lines = output.rstrip("\n").rpartition("\n\n")
    assert all(word in title for word in ("Python", "SQLite", "fastapi", "torch")), title
    headings, rule, *rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines.splitlines()]
    assert all(set(cell) <= set(":-") for cell in rule)
    return headings, rows


def numbers(rows: list[list[str]]) -> list[list[float]]:
    """The cells after the first of each row; of "412 (398 … 420)" the first number."""
    assert all(NUMBER.fullmatch(cell) for row in rows for cell in row[1:]), rows
    return [[float(cell.split()[0]) for cell in row[1:]] for row in rows]


def test_http_throughput(tmp_path: Path) -> None:
    """As a user starts it: it starts a service of its own, and leaves nothing of it."""
    arguments = ("--clients", "1", "2", "--seconds", "0.1", "--rounds", "2")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.http_throughput", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    headings, rows = parsed(result.stdout)
    assert not list(tmp_path.glob("flopwatch-*/data")), "the service's folder was left behind"
    assert headings == ["clients", "jobs per second", "server, CPU ms per job", "clients, CPU ms per job"]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(rate > 0 for rate, _, _ in numbers(rows))


def test_latencies(table: Callable[..., Table]) -> None:
    """It fails where a route has no request."""
    size = ("--finished", "30", "--queued", "5", "--measurements", "200", "--large", "50", "--side", "3")
    headings, rows = table(latencies, *size, "--rounds", "2")
    assert headings[:3] == ["request", "p50, ms", "p99, ms"]
    assert {"`GET /jobs`", "`GET /ui/sweeps/{sweep_id}`, unchanged", "`DELETE /jobs/{job_id}`"} < {
        row[0] for row in rows
    }
    statuses = {row[0]: row[headings.index("status")] for row in rows}
    assert all((status == "304") == ("unchanged" in name) for name, status in statuses.items()), statuses
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))
    kib = {row[0]: float(row[headings.index("answer, KiB")]) for row in rows}
    empty = kib["`GET /jobs`, running: none"]
    filtered = ("of a kind, failed", "by a label that all have, failed", "by a label that 1 in 20 has")
    assert all(kib[f"`GET /jobs`, {title}"] > empty for title in (*filtered, "by a label that one old job has"))


def test_sse_streams(table: Callable[..., Table]) -> None:
    headings, rows = table(sse_streams, "--streams", "5", "--rounds", "2")
    assert headings[:3] == ["streams", "`POST /jobs` p50, ms", "p99, ms"]
    assert [row[0] for row in rows] == ["none", "5, of as many jobs", "5, of one job"]
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))


def test_finish_memory(tmp_path: Path) -> None:
    found = finish(tmp_path, 50)
    assert 0 < found["start"] <= found["spooled"] <= found["peak"]


def test_job_overhead(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_overhead, "WARMUP", 1)
    headings, rows = table(job_overhead, "--jobs", "2", "--device", "cpu")
    assert headings == ["from → to", "median, ms", "p95, ms", "most, ms"]
    assert {"**submit → first line of the runner, recorded**", "**runner's end → succeeded**"} < {
        row[0] for row in rows
    }
    assert all(median <= p95 <= most for median, p95, most in numbers(rows))


def test_idle_cpu(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_cpu, "SETTLE_S", 0.2)
    headings, rows = table(idle_cpu, "--seconds", "0.3", "--queued", "20")
    per_process = [f"{name}, {unit}" for name in ("server", "worker") for unit in ("CPU s per minute", "% of a core")]
    assert headings == ["situation", *per_process]
    assert [row[0] for row in rows] == ["empty queue", "20 jobs that it cannot run", "and a client that follows one"]
    assert all(value < 200 for row in numbers(rows) for value in row)
