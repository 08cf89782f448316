"""Requests that wait to write keep nobody else waiting, and do not wait longer for each other."""

import hashlib
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.to_thread import run_sync

from app.api.writing import LONG_THREADS, THREADS, Writes
from app.errors import DatabaseBusy
from app.main import create_app
from app.settings import Settings
from app.store.keeping.bulk import Bulk, BulkDeleted
from benchmarks import latencies

TINY = {"kind": "benchmark", "model": {"size": "tiny"}}
SOURCE = b"def attention(q, k, v, is_causal=False):\n    return v\n"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
WRITES = {
    "POST /jobs": {"spec": TINY},
    "POST /sweeps": {"base": TINY, "grid": {"seed": [1, 2]}},
    "PATCH /jobs/{job_id}": {"note": "x"},
    "POST /jobs/{job_id}/cancel": None,
    "POST /jobs/{job_id}/retry": None,
    "POST /sweeps/{sweep_id}/cancel": None,
    "POST /sweeps/{sweep_id}/resume": None,
    "POST /jobs/cancel": None,
    "DELETE /jobs": None,
    "DELETE /jobs/{job_id}": None,
    "PUT /files/{sha256}": SOURCE,
    "PUT /baselines/{name}": {"job": 1},
    "DELETE /baselines/{name}": None,
    "PUT /queue/paused": {"kinds": []},
    "POST /tokens": {"name": "ada", "scope": "admin", "expires_days": None},
    "DELETE /tokens/{token_id}": None,
    "POST /ui/jobs/{job_id}/cancel": b"",
    "POST /ui/jobs/{job_id}/describe": b"note=x",
    "POST /ui/jobs/{job_id}/retry": b"",
    "POST /ui/jobs/cancel": b"job=1",
    "POST /ui/sweeps/{sweep_id}/cancel": b"",
    "POST /ui/sweeps/{sweep_id}/resume": b"",
    "POST /ui/demo": b"",
    "POST /ui/new": b"kind=benchmark&spec.model.size=tiny",
}
"""A valid body for each route that may write."""
SESSIONS = {"POST /ui/sign-in", "POST /ui/sign-out"}
"""They change what the server has in memory."""
WRITERS = 60
BUSY_TIMEOUT_S = 2.0
PROMPT_S = 1.5
"""How soon a read is answered meanwhile, and how much later than the timeout a write."""
ATTEMPTS = 3
"""A host that stands still for a moment makes some answers late, but not in each attempt."""


def write_while_locked(serve: Any, tmp_path: Path, writers: int) -> list[str]:
    """Submit from so many clients, cancel and pause while somebody holds the write lock; what others had to suffer."""
    found = []
    with serve(tmp_path, busy_timeout_s=BUSY_TIMEOUT_S) as site, ThreadPoolExecutor(writers) as clients:
        first = site.submit()["id"]
        requests = [("POST", "/jobs"), ("POST", f"/jobs/{first}/cancel"), ("PUT", "/queue/paused")]
        begun = threading.Semaphore(0)

        def write(number: int) -> tuple[str, httpx.Response, float]:
            method, path = requests[number % len(requests)]
            body = {"/jobs": {"json": {"spec": TINY}}, "/queue/paused": {"json": {"kinds": []}}}.get(path, {})
            with httpx.Client(base_url=site.url, timeout=60, trust_env=False) as client:
                client.get("/healthz")  # connected
                begun.release()
                started = time.monotonic()
                return path, client.request(method, path, **body), time.monotonic() - started

        with site.services.database.write():
            answers = [clients.submit(write, number) for number in range(writers)]
            for _ in answers:
                assert begun.acquire(timeout=30)
            deadline = time.monotonic() + BUSY_TIMEOUT_S / 2
            while time.monotonic() < deadline:
                for path in ("/jobs", "/healthz", "/readyz", f"/jobs/{first}", "/metrics"):
                    started = time.monotonic()
                    answer = site.http.get(path)
                    if (took_s := time.monotonic() - started) > PROMPT_S or answer.status_code != 200:
                        found.append(f"GET {path}: {answer.status_code} after {took_s:.1f} s")
            for path, answer, took_s in (answer.result(60) for answer in answers):
                if answer.status_code != 503 or answer.json()["code"] != "database_busy":
                    found.append(f"{path}: {answer.status_code}")
                elif not answer.headers.get("retry-after", "").isdigit():
                    found.append(f"{path}: no Retry-After")
                elif took_s > BUSY_TIMEOUT_S + PROMPT_S:
                    found.append(f"{path}: refused after {took_s:.1f} s")
        assert site.http.post("/jobs", json={"spec": TINY}).status_code == 201
    return found


@pytest.mark.alone
def test_waiting_writes_delay_no_reads(serve: Any, tmp_path: Path) -> None:
    found: list[str] = []
    for number in range(ATTEMPTS):
        found = write_while_locked(serve, tmp_path / str(number), WRITERS)
        if not any(" after " in line for line in found):
            break
    assert found == []


@pytest.mark.long
@pytest.mark.alone
def test_control_of_the_writers_threads(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "run", lambda _self, work: run_sync(work))
    # Fewer than above do: the last of them is answered sooner.
    found = write_while_locked(serve, tmp_path, WRITERS // 3)
    assert any(line.startswith("GET ") for line in found)
    assert any("refused after" in line for line in found)


class TestEveryRoute:
    """Every route that may write does so in the writers' threads."""

    def test_all_are_asked(self, tmp_path: Path) -> None:
        routes = latencies.routes_of(create_app(Settings(data_dir=tmp_path)))
        assert WRITES.keys() == {route for route in routes if not route.startswith("GET ")} - SESSIONS

    def test_it_writes_in_the_writers_threads(self, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        sweep = {"base": TINY, "grid": {"context_length": [64, 128]}}
        ids = {"job_id": site.submit()["id"], "sweep_id": site.http.post("/sweeps", json=sweep).json()["id"]}

        async def refuse(_self: Writes, _work: Any) -> None:
            raise DatabaseBusy("It came to the writers.")

        monkeypatch.setattr(Writes, "run", refuse)
        monkeypatch.setattr(Writes, "run_long", refuse)
        for route, body in WRITES.items():
            method, _, path = route.partition(" ")
            path = path.format(**ids, name="main", token_id="00", sha256=hashlib.sha256(SOURCE).hexdigest())
            if path in ("/jobs", "/jobs/cancel") and body is None:
                path += "?label=suite:none"
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = site.http.request(method, path, content=content, headers=FORM if "/ui/" in path else {})
            assert "It came to the writers." in answer.text, (route, answer.status_code, answer.text)


def submit_while_others_delete(serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> Any:
    """The answer to a job submitted while more clients delete in bulk, without end, than these threads can serve."""
    ended = threading.Event()

    def delete(_self: Bulk, _chosen: Any) -> BulkDeleted:
        assert ended.wait(60)
        return BulkDeleted(0, 0, 0)

    monkeypatch.setattr(Bulk, "delete", delete)
    with serve(folder, busy_timeout_s=0.5) as site, ThreadPoolExecutor(threads + 2) as clients:
        url = f"{site.url}/jobs?state=failed"
        try:
            answers = [clients.submit(httpx.delete, url, timeout=60, trust_env=False) for _ in range(threads + 2)]
            for refused in itertools.islice(as_completed(answers, timeout=30), 2):
                assert refused.result().status_code == 503
                assert refused.result().headers["retry-after"].isdigit()
            answer = site.http.post("/jobs", json={"spec": TINY})
        finally:
            ended.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * threads + [503] * 2
    return answer


def test_long_requests_keep_no_short_one_from_writing(serve, tmp_path, monkeypatch) -> None:
    assert submit_while_others_delete(serve, tmp_path, monkeypatch, LONG_THREADS).status_code == 201


def test_control_of_the_long_requests_threads(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "run_long", Writes.run)
    answer = submit_while_others_delete(serve, tmp_path, monkeypatch, THREADS)
    assert (answer.status_code, answer.json()["code"]) == (503, "database_busy")


def test_work_of_several_writes_is_not_cut_short(site: Any) -> None:
    """Once it has begun to write, each write waits as long as it may by itself."""
    database, timeout_s, written = site.services.database, 0.5, []
    held = threading.Event()

    def hold() -> None:
        with database.write():
            held.set()
            time.sleep(timeout_s)

    def work() -> None:
        with database.write():
            written.append("first")
        time.sleep(timeout_s)
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(10)
        with database.write():
            written.append("second")
        holder.join()

    async def run() -> None:
        await Writes(timeout_s).run(work)

    anyio.run(run)
    assert written == ["first", "second"]
