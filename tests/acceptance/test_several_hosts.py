"""The most important faults with a queue in PostgreSQL, and workers on several hosts, as it were: each has its own data
folder and device locks, and maybe a clock of its own. test_networks.py gives each a network as well."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.acceptance.conftest import environment
from tests.acceptance.faults import half_written
from tests.acceptance.sabotage import other_host, plain_job, plain_kind, wait_for_state
from tests.acceptance.test_clock import Moved, stays_its_workers
from tests.acceptance.test_competition import JOBS, run_all_once
from tests.acceptance.test_server_faults import kill_amid_submissions
from tests.acceptance.test_worker_faults import survives_a_killed_worker
from tests.forked import ForkedService
from tests.postgres import Server
from tools.service import Service, submit

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


def test_jobs_of_a_killed_host_run_on_another(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    service.start_server()
    survives_a_killed_worker(service, misbehave_folder, rng)


def test_two_hosts_run_every_job_once(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    service.start_server()
    run_all_once(service, misbehave_folder, rng, JOBS)


def test_what_was_answered_survives_kill_9_of_the_server(service, postgres, url, rng) -> None:
    wrong = kill_amid_submissions(service, rng)
    assert wrong + half_written(lambda question: postgres.execute(question, str(url.database))) == []


def test_a_clock_that_jumps_on_one_host_expires_nothing(service, misbehave_folder, rng) -> None:
    """A job runs on one host while the clock of another one jumps, to which it goes when its own is killed."""
    hours, folder = rng.sample([-2, -1, 1, 2], 2), misbehave_folder
    clock = service.folder / "clock"
    client = service.start_server(**plain_kind())
    first = service.start_worker(**plain_kind(), **other_host(folder.parent / "first"))
    job_id = submit(client, plain_job("gated"))
    wait_for_state(client, job_id, "running")
    second = service.start_worker(**plain_kind(MOVED_CLOCK=str(clock)), **other_host(folder.parent / "second"))
    stays_its_workers(Moved(service, client, [first, second], clock), job_id, folder, hours, tells_time=False)
