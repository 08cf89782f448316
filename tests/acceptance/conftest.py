"""Every test here runs against the real server and real workers: its own, or those that tests share."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from flopwatch import Flopwatch
from tests.app.cli.conftest import commands_made_once
from tests.forked import ForkedService
from tools.service import Service, wait_for_job
from workers.measure.ceilings import Ceilings

__all__ = ["commands_made_once"]

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
PROJECT = PLUGINS.parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark controls: each shows that a test can fail, takes as long as that test, and is run before a release."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name.startswith("test_control"):
            item.add_marker(pytest.mark.long)


def environment(folder: Path, *kinds: str) -> dict[str, str]:
    """For a service in `folder`: tests/plugins installed, short times, locks of its own; `kinds` are folders there."""
    path = [*(PLUGINS / kind for kind in kinds), PROJECT, PLUGINS, os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "MISBEHAVE_FOLDER": str(folder / "misbehave"),
        "FLOPWATCH_GRACE_S": "1",
        "FLOPWATCH_LEASE_S": "3",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",  # the kernels' tests interpret; users' workers do not
        "TMPDIR": str(folder),  # where workers of one host keep their locks: services do not wait for each other
    }


@pytest.fixture
def misbehave_folder(tmp_path: Path) -> Path:
    """Where the models of tests/plugins tell what they did."""
    folder = tmp_path / "misbehave"
    folder.mkdir()
    return folder


@pytest.fixture
def service(tmp_path: Path, misbehave_folder: Path) -> Iterator[Service]:
    """A service of one test's own that is not started yet."""
    assert misbehave_folder.parent == tmp_path
    with ForkedService(tmp_path / "service", environment(tmp_path)) as running:
        try:
            yield running
        finally:
            print(running.logs()[-20_000:])


@pytest.fixture
def own_service(tmp_path: Path, misbehave_folder: Path) -> Iterator[Service]:
    """The same with the kind of tests/plugins/plain_kind: its workers import no torch."""
    assert misbehave_folder.parent == tmp_path
    with ForkedService(tmp_path / "service", environment(tmp_path, "plain_kind")) as running:
        yield running
        print(running.logs()[-20_000:])


@dataclass(frozen=True)
class Site:
    """A server and one worker that run; `folder` is where the models of tests/plugins tell what they did."""

    client: httpx.Client
    folder: Path
    worker: subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def started_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, subprocess.Popen[bytes]]]:
    """A service with one worker that tests share, of all modules: to start one takes seconds of a core."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "misbehave").mkdir()
    with ForkedService(folder / "service", environment(folder, "plain_kind")) as running:
        running.start_server()
        # A profile measures ceilings that nobody has recorded, for seconds.
        Ceilings(running.data_dir / "ceilings").record(torch.device("cpu"), {"fp32": 100.0}, 1e5)
        yield running, running.start_worker(UNITS="forked", FLOPWATCH_ALLOW_CODE="true")


@pytest.fixture
def site(started_service: tuple[Service, subprocess.Popen[bytes]]) -> Iterator[Site]:
    """The shared service as if it were new: nothing is queued, nothing runs, the models have told nothing.

    For tests that leave server and worker alive. What else they need is their own: `service`, and `start`.
    """
    running, worker = started_service
    folder = Path(running.environment["MISBEHAVE_FOLDER"])
    shutil.rmtree(folder)
    folder.mkdir()
    client = running.client()
    yield Site(client, folder, worker)
    print(running.logs()[-20_000:])
    assert worker.poll() is None, "the worker that the tests share has ended"
    end_all_jobs(client)


@pytest.fixture
def flopwatch(site: Site) -> Iterator[Flopwatch]:
    """A client of the shared service."""
    with Flopwatch(str(site.client.base_url)) as client:
        yield client


@pytest.fixture(scope="session")
def server_without_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server for tests and controls whose workers are their own."""
    folder = tmp_path_factory.mktemp("controls")
    with ForkedService(folder / "service", environment(folder, "plain_kind")) as running:
        running.start_server()
        yield running


@pytest.fixture
def beside(server_without_workers: Service, tmp_path: Path, misbehave_folder: Path) -> Iterator[Service]:
    """The shared server, with workers of the test's own."""
    assert misbehave_folder.parent == tmp_path
    running = server_without_workers
    running.environment.update(environment(tmp_path, "plain_kind"))
    yield running
    print(running.logs()[-20_000:])
    running.stop_processes(*(one for one in running.processes if one is not running.server))
    end_all_jobs(running.client())


@pytest.fixture
def start_beside(beside: Service, misbehave_folder: Path) -> Callable[..., Site]:
    """Start a worker of the test's own beside the shared server; the arguments are environment of the worker."""
    return lambda **sabotage: Site(beside.client(), misbehave_folder, beside.start_worker(**sabotage))


def end_all_jobs(client: httpx.Client) -> None:
    """Cancel what waits or runs, and wait for its end."""
    # A running job whose worker was killed is queued again, and a queued one starts, between two of the questions.
    for state in ("running", "queued", "running"):
        for job in client.get("/jobs", params={"state": state, "limit": 500}).raise_for_status().json()["data"]:
            client.post(f"/jobs/{job['id']}/cancel")
            wait_for_job(client, job["id"])


def start(service: Service, folder: Path, **sabotage: str) -> Site:
    """Start server and worker of a service; `sabotage` is environment of the worker."""
    return Site(service.start_server(), folder, service.start_worker(**sabotage))


def short_job(model: str, *, vocab_size: int = 16, replicates: int = 1, **fields: Any) -> dict[str, Any]:
    """The body of a job of one step with one of tests/plugins' models.

    One replicate is forked from the warm parent; of several, each is a new interpreter, but not on the shared `site`.
    """
    shape = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    spec = {
        "kind": "benchmark",
        "model": {"name": model, "vocab_size": vocab_size, **shape},
        "batch_size": 1,
        "context_length": 1,
        "mode": "forward",
        "warmup_steps": 0,
        "measure_steps": 1,
        "replicates": replicates,
    }
    return {"spec": spec, **fields}
