"""Workers killed and stopped, and the processes of their jobs. Each check is also made with the mechanism that protects
taken out: it must fail then, else it would prove nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.service import Service, submit, wait_until
from tests.acceptance.conftest import short_job
from tests.acceptance.sabotage import (
    attempt_states,
    cleaned_up,
    get,
    open_gate,
    other_host,
    sabotaged,
    started,
    wait_for_start,
    wait_for_state,
    wait_until_gone,
    worker_id,
)

pytestmark = pytest.mark.acceptance

LEASE_S = 2.0
RECOVERY_S = 20.0
"""A lease, a look of the watcher, and much patience with a busy machine."""
CONTROL_S = 3 * LEASE_S
"""How long a control waits for what must not happen."""


@pytest.fixture(autouse=True)
def short_lease(service: Service) -> None:
    service.environment["FLOPWATCH_LEASE_S"] = str(LEASE_S)


def survives_a_killed_worker(
    service: Service, folder: Path, rng: random.Random, *, recovery_s: float = RECOVERY_S, **environment: str
) -> None:
    client = service.start_server(**environment)
    first = service.start_worker(**environment)
    job_id = submit(client, short_job("gated"))
    wait_for_state(client, job_id, "running")
    time.sleep(rng.uniform(0.0, 0.5))  # before its process has started, or after
    first.kill()
    second = service.start_worker(**other_host(service.folder / "second"), **environment)
    wait_until(
        lambda: get(client, f"/jobs/{job_id}")["attempt"] == 2, timeout_s=recovery_s, what="the job's second attempt"
    )
    open_gate(folder)
    job = wait_for_state(client, job_id, "succeeded")
    attempts = get(client, f"/jobs/{job_id}/attempts")
    assert [(attempt["number"], attempt["state"]) for attempt in attempts] == [(1, "lost"), (2, "succeeded")]
    assert attempts[0]["error"]["code"] == "worker_lost"
    assert attempts[1]["worker_id"] == job["worker_id"] == worker_id(client, second.pid)
    states = [event["data"]["state"] for event in get(client, f"/jobs/{job_id}/events") if event["type"] == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
    lost = worker_id(client, first.pid)
    wait_until(
        lambda: (lost, "lost") in [(worker["id"], worker["state"]) for worker in get(client, "/workers")],
        timeout_s=RECOVERY_S,
        what="the worker to be lost",
    )


def test_the_job_of_a_killed_worker_runs_again(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    survives_a_killed_worker(service, misbehave_folder, rng)


def test_control_without_the_watcher_it_never_does(
    service: Service, misbehave_folder: Path, rng: random.Random
) -> None:
    with pytest.raises(TimeoutError, match="second attempt"):
        survives_a_killed_worker(service, misbehave_folder, rng, recovery_s=CONTROL_S, **sabotaged("watcher"))


def fails_after_its_last_attempt(
    service: Service, folder: Path, rng: random.Random, *, recovery_s: float = RECOVERY_S, **environment: str
) -> None:
    client = service.start_server(**environment)
    max_attempts = rng.randint(1, 2)
    job_id = submit(client, short_job("gated", max_attempts=max_attempts))
    for number in range(1, max_attempts + 1):
        worker = service.start_worker(**other_host(service.folder / f"host-{number}"))
        wait_for_start(folder, number)
        worker.kill()
    job = wait_for_state(client, job_id, "failed", timeout_s=recovery_s)
    assert job["attempt"] == max_attempts
    assert job["error"]["code"] == "worker_lost"
    assert attempt_states(client, job_id) == ["lost"] * max_attempts
    assert len(started(folder)) == max_attempts


def test_a_job_that_loses_every_worker_fails(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    fails_after_its_last_attempt(service, misbehave_folder, rng)


def test_control_a_job_can_be_tried_for_ever(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    with pytest.raises(TimeoutError, match="to be failed"):
        fails_after_its_last_attempt(service, misbehave_folder, rng, recovery_s=CONTROL_S, **sabotaged("last_attempt"))


def ends_with_its_agent(service: Service, folder: Path, rng: random.Random, **environment: str) -> float:
    """Kill an agent; how long its job's processes lived on, in seconds."""
    client = service.start_server()
    worker = service.start_worker(**environment)
    submit(client, short_job("stubborn"))
    child, daemon = wait_for_start(folder)
    warm_and_keepers = [process.pid for process in psutil.Process(worker.pid).children(recursive=True)]
    time.sleep(rng.uniform(0.0, 0.2))
    killed_at = time.monotonic()
    worker.kill()
    wait_until_gone(child, daemon, timeout_s=CONTROL_S)
    seconds = time.monotonic() - killed_at
    wait_until_gone(*warm_and_keepers, timeout_s=CONTROL_S)
    return seconds


def test_the_processes_of_a_killed_agents_job_are_gone_within_a_second(
    service: Service, misbehave_folder: Path, rng: random.Random
) -> None:
    assert ends_with_its_agent(service, misbehave_folder, rng) < 1.0


def test_control_a_keeper_that_does_not_watch_its_pipe(
    service: Service, misbehave_folder: Path, rng: random.Random
) -> None:
    with cleaned_up(misbehave_folder), pytest.raises(TimeoutError, match="to be gone"):
        ends_with_its_agent(service, misbehave_folder, rng, **sabotaged("watched_pipe"))
