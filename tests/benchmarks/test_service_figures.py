"""The scripts behind the service's figures run, with few jobs, and end with a table of numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.finish_memory import finish

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
NUMBER = re.compile(r"\d+(\.\d+)?( \(\d+(\.\d+)? … \d+(\.\d+)?\))?")
"""412, or 412 (398 … 420)."""

pytestmark = pytest.mark.acceptance


def table(folder: Path, name: str, *arguments: str) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the table that the benchmark prints last."""
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "plugins")]),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr
    title, _, lines = result.stdout.rstrip("\n").rpartition("\n\n")
    assert all(word in title for word in ("Python", "SQLite", "fastapi", "torch")), title
    headings, rule, *rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines.splitlines()]
    assert all(set(cell) <= set(":-") for cell in rule)
    assert not list(folder.glob("flopwatch-*/data")), "the service's folder was left behind"
    return headings, rows


def numbers(rows: list[list[str]]) -> list[list[float]]:
    """The cells after the first of each row; of "412 (398 … 420)" the first number."""
    assert all(NUMBER.fullmatch(cell) for row in rows for cell in row[1:]), rows
    return [[float(cell.split()[0]) for cell in row[1:]] for row in rows]


def test_http_throughput(tmp_path: Path) -> None:
    arguments = ("--clients", "1", "3", "--seconds", "0.3", "--rounds", "2")
    headings, rows = table(tmp_path, "http_throughput", *arguments)
    assert headings == ["clients", "jobs per second", "server, CPU ms per job", "clients, CPU ms per job"]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(rate > 0 for rate, _, _ in numbers(rows))


def test_http_latency(tmp_path: Path) -> None:
    headings, rows = table(tmp_path, "http_latency", "--finished", "60", "--queued", "10", "--rounds", "3")
    assert headings == ["request", "p50, ms", "p99, ms", "answer, KiB"]
    assert {"`POST /jobs`", "`GET /jobs`", "`GET /jobs/{id}`"} < {row[0] for row in rows}
    assert all(0 < p50 <= p99 for p50, p99, _ in numbers(rows))


def test_latencies(tmp_path: Path) -> None:
    """It fails where a route has no request."""
    size = ("--finished", "30", "--queued", "5", "--measurements", "200", "--large", "50", "--side", "3")
    headings, rows = table(tmp_path, "latencies", *size, "--rounds", "2")
    assert headings[:3] == ["request", "p50, ms", "p99, ms"]
    assert {"`GET /jobs`", "`GET /ui/sweeps/{sweep_id}`, unchanged", "`DELETE /jobs/{job_id}`"} < {
        row[0] for row in rows
    }
    statuses = {row[0]: row[headings.index("status")] for row in rows}
    assert all((status == "304") == ("unchanged" in name) for name, status in statuses.items()), statuses
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))


def test_sse_streams(tmp_path: Path) -> None:
    headings, rows = table(tmp_path, "sse_streams", "--streams", "5", "--rounds", "3")
    assert headings[:3] == ["streams", "`POST /jobs` p50, ms", "p99, ms"]
    assert [row[0] for row in rows] == ["none", "5, of as many jobs", "5, of one job"]
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))


def test_finish_memory(tmp_path: Path) -> None:
    found = finish(tmp_path, 50)
    assert 0 < found["start"] <= found["spooled"] <= found["peak"]


def test_job_overhead(tmp_path: Path) -> None:
    headings, rows = table(tmp_path, "job_overhead", "--jobs", "2", "--device", "cpu")
    assert headings == ["from → to", "median, ms", "p95, ms", "most, ms"]
    assert {"**submit → first line of the runner, recorded**", "**runner's end → succeeded**"} < {
        row[0] for row in rows
    }
    assert all(median <= p95 <= most for median, p95, most in numbers(rows))


def test_idle_cpu(tmp_path: Path) -> None:
    headings, rows = table(tmp_path, "idle_cpu", "--seconds", "0.5", "--queued", "20")
    per_process = [f"{name}, {unit}" for name in ("server", "worker") for unit in ("CPU s per minute", "% of a core")]
    assert headings == ["situation", *per_process]
    assert [row[0] for row in rows] == ["empty queue", "20 jobs that it cannot run", "and a client that follows one"]
    assert all(value < 200 for row in numbers(rows) for value in row)
