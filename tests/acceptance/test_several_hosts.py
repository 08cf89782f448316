"""Workers on several hosts, as it were, share a queue in PostgreSQL: each has its own data folder and device locks,
and reaches the database through a network that can fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.acceptance.conftest import environment
from tests.acceptance.sabotage import (
    attempt_states,
    get,
    open_gate,
    other_host,
    plain_job,
    plain_kind,
    wait_for_start,
    wait_for_state,
    wait_until_gone,
    worker_id,
)
from tests.acceptance.test_worker_faults import survives_a_killed_worker, worker_states
from tests.forked import ForkedService
from tests.postgres import Proxy, Server
from tools.service import Service, submit
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance


@pytest.fixture
def url(postgres: Server) -> Iterator[URL]:
    with postgres.database() as database:
        yield database


@pytest.fixture
def service(url: URL, tmp_path: Path, misbehave_folder: Path) -> Iterator[Service]:
    """A service whose queue is in PostgreSQL."""
    assert misbehave_folder.parent == tmp_path
    settings = {**environment(tmp_path), **plain_kind(), "FLOPWATCH_DATABASE_URL": str(url)}
    with ForkedService(tmp_path / "service", settings) as running:
        yield running
        print(running.logs()[-20_000:])


def host(folder: Path) -> dict[str, str]:
    """Environment of a worker on a host of its own."""
    return {**other_host(folder), "FLOPWATCH_DATA_DIR": str(folder / "data")}


def test_jobs_of_a_killed_host_run_on_another(
    service: Service, misbehave_folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    service.start_server()
    survives_a_killed_worker(service, misbehave_folder, rng)


def test_a_host_whose_network_was_cut_for_two_leases(
    service: Service, url: URL, postgres: Server, misbehave_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "network").mkdir()
    client = service.start_server()
    with closing(Proxy(postgres.folder, tmp_path / "network")) as network:
        far = {"FLOPWATCH_DATABASE_URL": str(url.update_query_dict({"host": str(tmp_path / "network")}))}
        first = service.start_worker(**host(tmp_path / "first"), **far)
        answer = client.post("/jobs", json=plain_job("gated"))
        assert answer.status_code == 201, answer.text
        job_id = answer.json()["id"]
        processes = wait_for_start(misbehave_folder)
        network.cut()
        second = service.start_worker(**host(tmp_path / "second"))
        wait_for_start(misbehave_folder, 2, timeout_s=60)
        wait_until(lambda: worker_states(client)[worker_id(client, first.pid)] == "lost", what="the first to be lost")
        network.is_cut = False
        wait_until_gone(*processes, timeout_s=60)  # it hears that it has lost the job
        wait_until(lambda: worker_states(client)[worker_id(client, first.pid)] == "active", what="the first to be back")
        # Each host measures on its own CPU, alone: the second is busy.
        other = submit(client, plain_job("gated", number=1))
        wait_for_state(client, other, "running")
        open_gate(misbehave_folder)
        ended = [wait_for_state(client, job, "succeeded") for job in (job_id, other)]
        assert [job["worker_id"] for job in ended] == [worker_id(client, one.pid) for one in (second, first)]
        assert [attempt_states(client, job) for job in (job_id, other)] == [["lost", "succeeded"], ["succeeded"]]
        for job in (job_id, other):
            assert [event["type"] for event in get(client, f"/jobs/{job}/events")].count("done") == 1
        service.stop()
