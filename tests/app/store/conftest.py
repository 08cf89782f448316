"""A database per test, and short words for what tests do with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Claim, Finish, Idempotency, MeasurementRecord, NewJob, Offer, StoredArtifact
from tests.builders import measurement
from tests.clock import Clock
from tests.databases import put_database

KINDS = frozenset({"benchmark"})
CAPABILITIES = frozenset({"attention:eager", "kernel:weighted_sum", "model:transformer_lm"})
DEVICES = {0: [{"type": "cpu"}], 2: [{"type": "cpu"}, {"type": "cuda"}, {"type": "cuda"}]}


ON_SQLITE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
"""Marks tests of what only SQLite has; all others run on both engines."""


LITTLE_SQL = ("test_lease.py", "test_objects.py", "test_pausing.py", "test_waiting.py")
"""Modules about code with few statements, whose promises rest on what both engines have alike."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On PostgreSQL, of a test with many cases the first one runs, and none of LITTLE_SQL; the others do before a
    release."""
    seen = set()
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if values.get("engine") == "postgresql":
            test = item.nodeid.partition("[")[0]
            if test in seen or item.path.name in LITTLE_SQL:
                item.add_marker(pytest.mark.long)
            seen.add(test)


@pytest.fixture(params=("sqlite", "postgresql"))
def engine(request: pytest.FixtureRequest) -> str:
    """The engine of the test's database."""
    return str(request.param)


@pytest.fixture
def settings(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Settings of a data folder with an empty, migrated database."""
    data_dir = tmp_path / "data"
    if engine == "sqlite":
        put_database(data_dir)
        yield Settings(data_dir=data_dir, busy_timeout_s=5.0)
        return
    server = request.getfixturevalue("postgres")
    with server.database() as url:
        yield Settings(data_dir=data_dir, busy_timeout_s=5.0, database_url=url.render_as_string(hide_password=False))


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    opened = open_database(settings)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(b"trace")
    return path


@pytest.fixture
def reading(database: Database) -> Reading:
    return Reading(database)


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database)


@pytest.fixture
def registration(database: Database) -> Registration:
    return Registration(database)


@dataclass
class Shop:
    """Submits, claims and finishes with as few words as a test needs."""

    queue: Queue
    registration: Registration

    def submit(self, *, idempotency: Idempotency | None = None, spec: dict[str, Any] | None = None, **job: Any) -> int:
        new = NewJob(BenchmarkSpec.model_validate(spec or {}), **job)
        return int(self.queue.submit(new, idempotency).response["id"])

    def offer(self, **changes: Any) -> Offer:
        usual = {"kinds": KINDS, "capabilities": CAPABILITIES, "total_gpus": 0, "free_gpus": 0, "idle": True}
        return Offer(**{**usual, **changes})

    def register(self, worker_id: str = "worker", *, gpus: int = 0, capabilities: Any = CAPABILITIES) -> None:
        self.registration.register_worker(worker_id, "host", 1, KINDS, capabilities, DEVICES[gpus], {"torch": "2.13"})

    def claim(self, worker_id: str = "worker", **offer: Any) -> Claim:
        claim = self.try_claim(worker_id, **offer)
        assert claim is not None
        return claim

    def try_claim(self, worker_id: str = "worker", **offer: Any) -> Claim | None:
        return self.queue.claim(worker_id, self.offer(**offer))

    def running_job(self, **job: Any) -> Claim:
        self.submit(**job)
        return self.claim()

    def ran(self, state: Any = "succeeded", **left: Any) -> int:
        """Run a job to this end; returns its id."""
        claim = self.running_job()
        self.queue.finish(claim, Finish(state, **left))
        return claim.job_id


@pytest.fixture
def shop(queue: Queue, registration: Registration) -> Shop:
    return Shop(queue, registration)


@pytest.fixture
def record() -> Callable[..., MeasurementRecord]:
    """Build a measurement; what is not given is plain."""

    def build(metric: str = "step_ms", **changes: Any) -> MeasurementRecord:
        plain = {"case": {"model": "tiny", "context_length": 128}, "case_key": "key"}
        if changes.get("outcome", "ok") == "ok":
            plain |= {"n": 10, "std": 0.5}
        return measurement(metric, **plain | changes)

    return build


@pytest.fixture
def results(record: Callable[..., MeasurementRecord]) -> Finish:
    """A success with a measurement, an artifact, an environment, a verdict and a log."""
    return Finish(
        "succeeded",
        measurements=[record()],
        artifacts=[StoredArtifact(0, "trace.json", "trace", "application/json", 3, "ab" * 32)],
        environment={"gpu": None},
        validity={"valid": True},
        log="done\n",
    )
