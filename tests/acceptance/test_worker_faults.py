"""Workers killed and stopped, and the processes of their jobs."""

import random
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import httpx
import psutil
import pytest

from app.errors import DatabaseBusy
from app.store.database.engine import Database
from tests.acceptance.sabotage import (
    POLL_S,
    attempt_states,
    fails_without,
    get,
    open_gate,
    other_host,
    plain_job,
    plain_kind,
    started,
    wait_for_start,
    wait_for_state,
    wait_until_gone,
    worker_id,
)
from tools.service import Service, submit
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

LEASE_S = 3.0
"""A busy machine may let a worker wait for two seconds, which must not lose it."""
RECOVERY_S = 20.0
"""A lease, a look of the watcher, and much patience with a busy machine."""
GONE_S = 5.0
"""How soon the processes of a killed agent's job are gone, on a busy machine; a tenth of a second is usual."""
CONTROL_S = 2.0 * LEASE_S
"""How long a control waits for what must not happen."""


def survives_a_killed_worker(service, folder, rng, *, recovery_s=RECOVERY_S, **sabotage) -> None:
    client = service.client()
    first = service.start_worker(**sabotage)
    job_id = submit(client, plain_job("gated"))
    wait_for_state(client, job_id, "running")
    time.sleep(rng.uniform(0.0, 0.5))  # before its process has started, or after
    first.kill()
    second = service.start_worker(**other_host(folder.parent / "second"), **sabotage)
    wait_until(
        lambda: get(client, f"/jobs/{job_id}")["attempt"] == 2,
        timeout_s=recovery_s,
        what="the job's second attempt",
        poll_s=POLL_S,
    )
    open_gate(folder)
    job = wait_for_state(client, job_id, "succeeded")
    attempts = get(client, f"/jobs/{job_id}/attempts")
    assert [(attempt["number"], attempt["state"]) for attempt in attempts] == [(1, "lost"), (2, "succeeded")]
    assert attempts[0]["error"]["code"] == "worker_lost"
    assert attempts[1]["worker_id"] == job["worker_id"] == worker_id(client, second.pid)
    states = [event["data"]["state"] for event in get(client, f"/jobs/{job_id}/events") if event["type"] == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
    first_id = worker_id(client, first.pid)
    wait_until(
        lambda: worker_states(client)[first_id] == "lost",
        timeout_s=RECOVERY_S,
        what="the worker to be lost",
        poll_s=POLL_S,
    )


def test_the_job_of_a_killed_worker_runs_again(beside: Service, misbehave_folder: Path, rng: random.Random) -> None:
    survives_a_killed_worker(beside, misbehave_folder, rng)


def test_control_without_the_watcher_it_never_does(own_service, misbehave_folder, rng) -> None:
    without_it = plain_kind("watcher")
    own_service.start_server(**without_it)
    with pytest.raises(TimeoutError, match="second attempt"):
        survives_a_killed_worker(own_service, misbehave_folder, rng, recovery_s=CONTROL_S, **without_it)


def test_a_job_that_loses_every_worker_fails(beside: Service, misbehave_folder: Path, rng: random.Random) -> None:
    client = beside.client()
    max_attempts = rng.randint(1, 2)
    job_id = submit(client, plain_job("gated", max_attempts=max_attempts))
    for number in range(1, max_attempts + 1):
        worker = beside.start_worker(**other_host(misbehave_folder.parent / f"host-{number}"))
        wait_for_start(misbehave_folder, number)
        worker.kill()
    job = wait_for_state(client, job_id, "failed", timeout_s=RECOVERY_S)
    assert job["attempt"] == max_attempts
    assert job["error"]["code"] == "worker_lost"
    assert attempt_states(client, job_id) == ["lost"] * max_attempts
    assert len(started(misbehave_folder)) == max_attempts


def test_control_a_job_can_be_tried_for_ever(own_service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    without_it = fails_without(own_service, "last_attempt", match="to be failed")
    with without_it, patch.dict(globals(), RECOVERY_S=CONTROL_S):
        own_service.start_server()
        test_a_job_that_loses_every_worker_fails(own_service, misbehave_folder, rng)


def test_a_killed_agents_processes_are_gone_at_once(beside, misbehave_folder, rng) -> None:
    client = beside.client()
    worker = beside.start_worker()
    submit(client, plain_job("stubborn", start=rng.choice(["fork", "exec"])))
    child, daemon = wait_for_start(misbehave_folder)
    warm_and_keepers = [process.pid for process in psutil.Process(worker.pid).children(recursive=True)]
    time.sleep(rng.uniform(0.0, 0.2))
    worker.kill()
    wait_until_gone(child, daemon, timeout_s=GONE_S)
    wait_until_gone(*warm_and_keepers, timeout_s=RECOVERY_S)


def test_control_a_keeper_that_does_not_watch_its_pipe(beside, misbehave_folder, rng) -> None:
    with fails_without(beside, "watched_pipe", match="to be gone"):
        test_a_killed_agents_processes_are_gone_at_once(beside, misbehave_folder, rng)


def stop_between_writes(service: Service, worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker, but not while it holds the write lock: nobody else could write then."""
    with closing(Database(service.settings().resolved_database_url, busy_timeout_s=LEASE_S / 4)) as database:
        while True:
            worker.send_signal(signal.SIGSTOP)
            try:
                with database.write():
                    return
            except DatabaseBusy:
                worker.send_signal(signal.SIGCONT)


def stale_worker_records_nothing(service: Service, folder: Path, **sabotage: str) -> None:
    """Stop a worker past its lease; another runs the job. Then the first goes on, with a finished job in its hands."""
    client = service.client()
    stale = service.start_worker(**sabotage)
    job_id = submit(client, plain_job("gated"))
    (stale_child,) = wait_for_start(folder)
    stop_between_writes(service, stale)
    winner = service.start_worker(**other_host(folder.parent / "second"))
    (child,) = wait_for_start(folder, 2)
    winner_id = worker_id(client, winner.pid)
    open_gate(folder, stale_child)
    wait_until_gone(stale_child, timeout_s=RECOVERY_S)  # its results lie in the pipe to the stopped worker
    stale.send_signal(signal.SIGCONT)
    # When the stale worker, the only free one, has run another job it must be done with the first.
    next_id = submit(client, plain_job("counted"))
    assert wait_for_state(client, next_id, "succeeded")["worker_id"] == worker_id(client, stale.pid)
    assert get(client, f"/jobs/{job_id}")["state"] == "running"
    assert get(client, f"/jobs/{job_id}/measurements")["rows"] == []
    assert get(client, f"/jobs/{job_id}/artifacts") == []
    open_gate(folder, child)
    wait_for_state(client, job_id, "succeeded")
    job = get(client, f"/jobs/{job_id}")
    assert (job["state"], job["worker_id"]) == ("succeeded", winner_id)
    assert attempt_states(client, job_id) == ["lost", "succeeded"]
    events = get(client, f"/jobs/{job_id}/events")
    numbers = [event["attempt"] for event in events]
    assert numbers == sorted(numbers), "the first attempt was heard of after the second had begun"
    assert events[-1]["type"] == "done"
    (artifact,) = get(client, f"/jobs/{job_id}/artifacts")
    assert client.get(artifact["url"]).json() == measured_step_ms(client, job_id)


def measured_step_ms(client: httpx.Client, job_id: int) -> list[float]:
    rows = get(client, f"/jobs/{job_id}/measurements?samples=true")["rows"]
    (row,) = [row for row in rows if row["metric"] == "step_ms"]
    return list(row["samples"])


def test_results_after_the_lease_do_not_count(beside: Service, misbehave_folder: Path) -> None:
    stale_worker_records_nothing(beside, misbehave_folder)


def test_control_without_the_fence_it_counts(beside: Service, misbehave_folder: Path) -> None:
    with pytest.raises(AssertionError, match="'succeeded' == 'running'"):
        stale_worker_records_nothing(beside, misbehave_folder, **plain_kind("fence"))


@pytest.mark.parametrize("in_time", [True, False], ids=["ends in time", "given back"])
def test_sigterm_drains_a_worker(beside: Service, misbehave_folder: Path, in_time: bool) -> None:
    """Send SIGTERM to a worker with a running and a queued job, whose grace the running one outlasts or not."""
    folder, client = misbehave_folder, beside.client()
    first = beside.start_worker(FLOPWATCH_GRACE_S=str(RECOVERY_S if in_time else 0.5))
    first_id = worker_id(client, first.pid)
    running, queued = submit(client, plain_job("gated")), submit(client, plain_job("counted"))
    (child,) = wait_for_start(folder)
    first.terminate()
    wait_until(
        lambda: worker_states(client)[first_id] != "active" or first.poll() is not None,
        timeout_s=RECOVERY_S,
        what="the worker to hear of it",
    )
    if in_time:
        open_gate(folder)
    assert first.wait(timeout=RECOVERY_S) == 0
    assert worker_states(client)[first_id] == "stopped"
    wait_until_gone(child, timeout_s=CONTROL_S)
    assert get(client, f"/jobs/{queued}")["state"] == "queued"
    assert get(client, f"/jobs/{running}")["state"] == ("succeeded" if in_time else "queued")
    second = beside.start_worker(**other_host(folder.parent / "second"))
    open_gate(folder)
    ended = [wait_for_state(client, job_id, "succeeded") for job_id in (running, queued)]
    second_id = worker_id(client, second.pid)
    assert [job["worker_id"] for job in ended] == [first_id if in_time else second_id, second_id]
    assert [job["attempt"] for job in ended] == [1, 1]
    assert attempt_states(client, running) == (["succeeded"] if in_time else ["given_back", "succeeded"])


def worker_states(client: httpx.Client) -> dict[str, str]:
    return {worker["id"]: worker["state"] for worker in get(client, "/workers")}
