"""A real server, on a real database in a temporary folder, and a worker played by the test."""

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app.api.services import Services
from app.errors import job_problem
from app.main import create_app
from app.server.process import trusted_proxies
from app.settings import Settings
from app.store.records import Claim, Finish, MeasurementRecord, NewEvent, Offer, StoredArtifact, TableRecord
from tests import builders
from tests.databases import put_database
from tests.plugins import naps
from tools.waiting import wait_until

START_TIMEOUT_S = 30.0
KINDS = frozenset({"benchmark"})
CAPABILITIES = frozenset({"attention:eager", "kernel:weighted_sum", "model:transformer_lm"})
TINY = {"kind": "benchmark", "model": {"size": "tiny"}}


@dataclass
class Worker:
    """A worker that does what the test says."""

    services: Services
    id: str = "test-worker"
    claims: list[Claim] = field(default_factory=list)

    def register(self, kinds: frozenset[str] = KINDS, capabilities: frozenset[str] = CAPABILITIES) -> None:
        devices = [{"type": "cpu", "name": "test CPU"}]
        self.services.registration.register_worker(self.id, "host", 1, kinds, capabilities, devices, {"torch": "2.13"})

    def try_claim(self, *kinds: str, can: frozenset[str] = CAPABILITIES, waits_for: str | None = None) -> Claim | None:
        offer = Offer(frozenset(kinds) or KINDS, can, total_gpus=0, free_gpus=0, idle=True)
        return self.services.queue.claim(self.id, offer, waits_for)

    def claim(self, *kinds: str, can: frozenset[str] = CAPABILITIES) -> Claim:
        claim = self.try_claim(*kinds, can=can)
        assert claim is not None, "nothing to claim"
        return claim

    def claim_job(self, job_id: int) -> Claim:
        """Claim until it is this job; those in front of it are cancelled."""
        while (claim := self.claim()).job_id != job_id:
            self.finish(claim, "cancelled")
        return claim

    def report(self, claim: Claim, type_: str, **data: Any) -> None:
        self.services.queue.report(claim, [NewEvent(type_, data)])

    def finish(self, claim: Claim, state: Any = "succeeded", **results: Any) -> str:
        if state == "failed":
            results.setdefault("error", job_problem("failed", "It broke."))
        return self.services.queue.finish(claim, Finish(state, **results))


@dataclass
class Site:
    """A running server."""

    url: str
    services: Services
    worker: Worker
    http: httpx.Client

    def submit(self, *, spec: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Submit a tiny benchmark, with these spec fields and options."""
        response = self.http.post("/jobs", json={"spec": TINY | (spec or {}), **options})
        assert response.status_code == 201, response.text
        return response.json()

    def run(self, state: str = "succeeded", *, spec: dict[str, Any] | None = None, **results: Any) -> int:
        """Let the worker run a job, in front of all others, to this end; returns its id."""
        job_id: int = self.submit(spec=spec, priority=900)["id"]
        self.worker.finish(self.worker.claim_job(job_id), state, **results)
        return job_id

    def stored(self, content: bytes, name: str = "trace.json.gz", media_type: str = "application/gzip") -> Any:
        """Store a file that a job may have made."""
        sha256, size = self.services.files.put_bytes(content)
        self.services.files.release([sha256])
        return StoredArtifact(0, name, "trace", media_type, size, sha256)

    def job(self, job_id: int) -> dict[str, Any]:
        return self.http.get(f"/jobs/{job_id}").json()

    def rows(self) -> dict[str, int]:
        """How much is stored."""
        with self.services.database.read() as connection:
            return {
                name: connection.exec_driver_sql(f"select count(*) from {name}").scalar_one()
                for name in ("job", "sweep", "event", "idempotency_key")
            }


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Site]:
    """A server in a thread of this process."""
    if not any(folder.glob("*.sqlite3")):
        put_database(folder)
    chosen = Settings(data_dir=folder, **settings)
    app = create_app(chosen)
    believed = trusted_proxies(chosen)
    config = uvicorn.Config(
        app, port=0, log_level="warning", timeout_graceful_shutdown=2, lifespan="on", forwarded_allow_ips=believed
    )
    naps.shorten()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server's start", START_TIMEOUT_S)
        assert server.started
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        services = app.state.services
        with httpx.Client(base_url=url, timeout=30.0, trust_env=False, verify=False) as http:
            yield Site(url, services, Worker(services), http)
        services.changes.stop()
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that the tests of one module share: they look only at what they made themselves."""
    with serving(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture
def fresh_site(tmp_path: Path) -> Iterator[Site]:
    """A server of one test's own."""
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def obedient_later(site: Site) -> Iterator[Callable[[], None]]:
    """Call it, and from then on a worker is played in the background: it finishes what it claims, as the job's name
    says."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            if (claim := site.worker.try_claim()) is None:
                time.sleep(0.02)
                continue
            site.worker.report(claim, "progress", done=1, total=2, message="measuring")
            site.worker.report(claim, "log", text="a line of output\n")
            state = "failed" if (claim.name or "").startswith("fails") else "succeeded"
            case = {"model": "tiny", "context_length": 8}
            measurements = [] if state == "failed" else [builders.measurement("forward_ms", 1.25, max=2.5, case=case)]
            is_wrong = (claim.name or "").startswith("is wrong")
            validity = {"verdict": "wrong", "counts": {"wrong": 1}, "checks": []} if is_wrong else None
            site.worker.finish(claim, state, measurements=measurements, validity=validity, log="a line of output\n")

    thread = threading.Thread(target=work)
    yield thread.start
    stop.set()
    if thread.ident is not None:
        thread.join()


@pytest.fixture
def obedient(obedient_later: Callable[[], None]) -> None:
    """Plays that worker during the whole test."""
    obedient_later()


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Site]]:
    """Start a server with settings of one's own."""
    return serving


@pytest.fixture(scope="session")
def measured() -> Callable[..., MeasurementRecord]:
    return builders.measured


@pytest.fixture(scope="session")
def reported() -> Callable[..., TableRecord]:
    """Make a table as a unit reported it; `columns` are types by name, milliseconds where the name says so."""

    def make(name: str, rows: Sequence[Sequence[Any]], /, unit_index: int = 0, **columns: str) -> TableRecord:
        described = [{"name": c, "type": t, "unit": "ms" if c.endswith("_ms") else None} for c, t in columns.items()]
        return TableRecord(unit_index, name, described, len(rows), zlib.compress(json.dumps(rows).encode()))

    return make
