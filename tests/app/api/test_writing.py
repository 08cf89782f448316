"""Requests that wait to write keep nobody else waiting, and do not wait longer for each other."""

import hashlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.services import LONG_THREADS, THREADS, Writes
from app.errors import DatabaseBusy
from app.main import create_app
from app.settings import Settings
from app.store.keeping.bulk import Bulk, BulkDeleted
from benchmarks import latencies
from tests.app.conftest import TINY
from tools.waiting import wait_until

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


@pytest.mark.alone
def test_waiting_writes_delay_no_reads(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path, busy_timeout_s=60) as site, ThreadPoolExecutor(WRITERS) as clients:
        sent = {"json": {"spec": TINY}, "timeout": 60, "trust_env": False}
        with site.services.database.write():
            answers = [clients.submit(httpx.post, f"{site.url}/jobs", **sent) for _ in range(WRITERS)]
            waiting = site.services.writes._threads
            wait_until(lambda: waiting.statistics().tasks_waiting == WRITERS - THREADS, "all writes to wait", 30)
            for path in ("/jobs", "/healthz", "/readyz", "/metrics"):
                assert site.http.get(path, timeout=10).status_code == 200
        assert {answer.result().status_code for answer in answers} == {201}


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


def test_long_requests_keep_no_short_one_from_writing(serve, tmp_path, monkeypatch) -> None:
    """More clients delete in bulk, without end, than there are threads for it."""
    ended = threading.Event()

    def delete(_self: Bulk, _chosen: Any) -> BulkDeleted:
        assert ended.wait(60)
        return BulkDeleted(0, 0, 0)

    monkeypatch.setattr(Bulk, "delete", delete)
    clients = LONG_THREADS + 2
    with serve(tmp_path, busy_timeout_s=0.5) as site, ThreadPoolExecutor(clients) as pool:
        url = f"{site.url}/jobs?state=failed"
        try:
            answers = [pool.submit(httpx.delete, url, timeout=60, trust_env=False) for _ in range(clients)]
            for refused in itertools.islice(as_completed(answers, timeout=30), 2):
                assert refused.result().status_code == 503
                assert refused.result().headers["retry-after"].isdigit()
            assert site.http.post("/jobs", json={"spec": TINY}).status_code == 201
        finally:
            ended.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * LONG_THREADS + [503] * 2
