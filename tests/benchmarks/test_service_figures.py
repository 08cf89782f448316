"""The scripts behind the service's figures run, with few jobs, and print tables of numbers.

One is started as a user does. The others run in this process, on one server that they share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _shared, latencies, run, service, store
from benchmarks._shared import TINY
from flopwatch.client import Flopwatch
from tests.forked import ForkedService
from tools.service import Service

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
NUMBER = re.compile(r"\d+(\.\d+)?( \(\d+(\.\d+)? … \d+(\.\d+)?\))?")
"""412, or 412 (398 … 420)."""

pytestmark = [pytest.mark.acceptance, pytest.mark.long]

Table = tuple[list[str], list[list[str]]]


def environment(folder: Path) -> dict[str, str]:
    """Of the scripts' processes: with tests/plugins, and `folder` for temporary files and the workers' locks."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "plugins")])
    return {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The server that the scripts share."""
    folder = tmp_path_factory.mktemp("figures")
    with ForkedService(folder / "service", environment(folder)) as shared:
        shared.start_server()
        yield shared


@pytest.fixture
def table(
    running: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Table]]:
    """Run a script on the shared server. At the end no job is queued, so that no script's worker runs another's."""
    for module in (latencies, service):
        monkeypatch.setattr(module, "started_service", lambda *_, **_folder: contextlib.nullcontext(running))

    def run_script(script: Callable[..., None], **options: Any) -> Table:
        script(**options)
        return parsed(capsys.readouterr().out)

    yield run_script
    client: Any = running.client()
    client.post("/jobs/cancel", params={"state": "queued"}).raise_for_status()
    running.stop_processes(*(process for process in running.processes if process is not running.server))


def parsed(output: str) -> Table:
    """The headings and the rows of the table that a script prints."""
    title, _, lines = output.rstrip("\n").rpartition("\n\n")
    assert all(word in title for word in ("Python", "SQLite", "fastapi", "torch")), title
    headings, rule, *rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines.splitlines()]
    assert all(set(cell) <= set(":-") for cell in rule)
    return headings, rows


def numbers(rows: list[list[str]]) -> list[list[float]]:
    """The cells after the first of each row; of "412 (398 … 420)" the first number."""
    assert all(NUMBER.fullmatch(cell) for row in rows for cell in row[1:]), rows
    return [[float(cell.split()[0]) for cell in row[1:]] for row in rows]


def test_throughput(tmp_path: Path) -> None:
    """As a user starts it: it starts a service of its own, and leaves nothing of it."""
    arguments = ("throughput", "--clients", "1", "--clients", "2", "--seconds", "0.1", "--rounds", "2")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.service", *arguments],
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


def test_latencies(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "Size", lambda: SIZE)
    monkeypatch.setattr(latencies, "NUMBERS", (20, 40))
    headings, rows = table(latencies.main, rounds=2)
    assert headings[:3] == ["request", "p50, ms", "p99, ms"]
    assert {"`GET /jobs`", "`GET /ui/sweeps/{sweep_id}`", "`GET /tables?job={20}&format=latex`"} < {
        row[0] for row in rows
    }
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))
    kib = {row[0].strip("`"): float(row[headings.index("answer, KiB")]) for row in rows}
    for query in ("kind=benchmark&state=failed", "label=suite:nightly&state=failed", "label=team:some"):
        assert kib[f"GET /jobs?{query}"] > 0.2, "it finds jobs"
    statuses = {row[0].strip("`"): row[headings.index("status")] for row in rows}
    assert {
        statuses[f"GET /ui{path}"] for path in ("", "/jobs/{large}/cells?page=50", "/plots?sweep={sweep_id}{fresh}")
    } == {"200"}
    assert statuses["POST /sweeps/{sweep_id}/resume"] == "409", "all its jobs have succeeded"


SIZE = latencies.Size(finished=30, queued=5, side=3, large=50)


def test_followers(table: Callable[..., Table]) -> None:
    headings, rows = table(service.followers, streams=5, rounds=2)
    assert headings[:3] == ["streams", "`POST /jobs` p50, ms", "p99, ms"]
    assert [row[0] for row in rows] == ["none", "5, of as many jobs", "5, of one job"]
    assert all(0 < p50 <= p99 for p50, p99, *_ in numbers(rows))


def test_latencies_of_both_engines(
    postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is filled stays; the database on PostgreSQL is dropped."""

    def forked(folder: Path, settings: dict[str, str]) -> ForkedService:
        return ForkedService(folder, {**environment(tmp_path), **settings})

    monkeypatch.setattr(_shared, "Service", forked)
    monkeypatch.setattr(latencies, "Size", lambda: SIZE)
    monkeypatch.setattr(latencies, "NUMBERS", (20,))
    latencies.main("GET /jobs$", 2, filled=tmp_path / "filled")
    capsys.readouterr()
    (tmp_path / "filled" / "01-server.log").unlink()  # forks append to it
    monkeypatch.setattr(latencies, "fill", lambda *_: pytest.fail("It is filled."))
    url = postgres.url("postgres").render_as_string()
    latencies.main("GET /jobs$|POST|team", 2, filled=tmp_path / "filled", postgresql=url)
    headings, rows = parsed(capsys.readouterr().out)
    assert [row[0] for row in rows] == [
        "`GET /jobs`",
        "`GET /jobs?label=team:some`",
        "`POST /sweeps/{sweep_id}/resume`",
    ]
    for row in rows:
        cells = dict(zip(headings, row, strict=True))
        assert cells["status"] == cells["PostgreSQL status"]
        assert 0 < float(cells["PostgreSQL p50, ms"]) <= float(cells["PostgreSQL p99, ms"])
    assert postgres.execute("SELECT datname FROM pg_database WHERE datname LIKE 'flopwatch_benchmark%'") == []


def test_overhead(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WARMUP", 1)
    headings, rows = table(service.overhead, jobs=2, device="cpu")
    assert headings == ["from → to", "median, ms", "p95, ms", "most, ms"]
    assert [row[0] for row in rows] == list(service.INTERVALS)
    assert all(median <= p95 <= most for median, p95, most in numbers(rows))


def test_idle(table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SETTLE_S", 0.2)
    headings, rows = table(service.idle, seconds=0.3, queued=20)
    assert headings == ["situation", "server, % of a core", "worker, % of a core"]
    assert [row[0] for row in rows] == ["empty queue", "25 jobs that it cannot run", "and a client that follows one"]
    assert all(value < 200 for row in numbers(rows) for value in row)


def test_run_prints_the_table_of_a_file(
    running: Service, table: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    grids = [{"context_length": [16, 32]}, {"precision": ["bf16"]}]
    (tmp_path / "tiny.json").write_text(json.dumps({"base": TINY, "grids": grids, "columns": ["forward_ms"]}))
    monkeypatch.setattr(run, "SPECS", tmp_path)
    running.start_worker()
    with Flopwatch(running.url) as client:
        assert run.run(client, "tiny")
    printed = capsys.readouterr().out
    assert re.match(r"\$ flopwatch table --sweep \d+ --sweep \d+ --columns forward_ms\n", printed)
    assert len(re.findall(r"^\| tiny", printed, re.MULTILINE)) == 3


def test_rates_of_the_store_on_postgresql(tmp_path: Path, postgres: Any) -> None:
    made = store._made(postgres.url("postgres"), tmp_path)
    rates = {row["what"]: row["measured"] for row in store._rates(made, 20, 20)}
    assert list(rates)[:3] == ["submissions/s, 1 thread", "submissions/s, 4 threads", "claims/s, 1 process"]
    assert all(rates.values())
    assert postgres.execute("SELECT datname FROM pg_database WHERE datname LIKE 'flopwatch_benchmark%'") == []


def test_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.main(tmp_path, submissions=20, claims=20, queued=[50], measurements=[1500], swept=[100])
    _, rows = parsed(capsys.readouterr().out)
    assert [name for name, _ in rows] == [
        "submissions/s, 1 thread",
        "submissions/s, 4 threads",
        "claims/s, 1 process",
        "claim p50 / p99 / max, 1 process",
        "claims/s, 4 processes",
        "claim p50 / p99 / max, 4 processes",
        "claim p50 / p99 / max, 50 queued",
        "1,500 measurements: the agent before, all spooled, at most",
        "1,500 measurements: the commit",
        "1,500 measurements: submission meanwhile, p50 / p99 / max",
        "1,500 measurements: renewal meanwhile, p50 / p99 / max",
        "a sweep of 100 jobs: the submission, of which it holds the write lock",
        "a sweep of 100 jobs: submission meanwhile, p50 / p99 / max",
        "a sweep of 100 jobs: renewal meanwhile, p50 / p99 / max",
    ]
    for _, value in rows:
        assert re.fullmatch(r"[\d,]+|([\d.]+ / )?[\d.]+ s|[\d.]+ / [\d.]+ / [\d.]+ (ms|MiB)", value), value
    assert list(tmp_path.iterdir()) == []
