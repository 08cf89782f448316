"""Jobs that are ended before their time: cancelled, timed out."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from tests.acceptance.conftest import Site, start
from tests.acceptance.sabotage import (
    attempt_states,
    fails_without,
    get,
    open_gate,
    plain_job,
    wait_for_start,
    wait_for_state,
    wait_until_gone,
)
from tests.processes import is_alive
from tools.service import Service, submit, wait_for_job
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

PATIENCE_S = 20.0
CANCELLED_S = 10.0
"""How soon a running job has heard of its cancel and ended, on a busy machine."""
GRACE_S = 1.0
"""As conftest.py sets it: between SIGTERM and SIGKILL."""


def cancel(client: httpx.Client, job_id: int, status: int = 202) -> dict[str, Any]:
    """Ask for the job's cancel; the answer's body, which must have this status."""
    answer = client.post(f"/jobs/{job_id}/cancel")
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_queued_job_that_is_cancelled_never_runs(site: Site) -> None:
    client = site.client
    submit(client, plain_job("gated"))
    wait_for_start(site.folder)
    job_id = submit(client, plain_job("counted", number=100))
    assert cancel(client, job_id)["state"] == "cancelled"
    job = get(client, f"/jobs/{job_id}")
    assert (job["state"], job["attempt"], job["error"]["code"]) == ("cancelled", 0, "cancelled")
    assert cancel(client, job_id) == job, "a second cancel must be answered like the first"
    last = submit(client, plain_job("counted", number=200))
    open_gate(site.folder)
    wait_for_state(client, last, "succeeded")
    assert (site.folder / "runs").read_text().split() == ["200"]
    assert get(client, f"/jobs/{job_id}") == job
    assert get(client, f"/jobs/{job_id}/attempts") == []


def test_control_of_the_cancel_of_a_queued_job(own_service: Service, misbehave_folder: Path) -> None:
    with fails_without(own_service, "cancel_of_queued", match="'queued' == 'cancelled'"):
        test_a_queued_job_that_is_cancelled_never_runs(start(own_service, misbehave_folder))


def test_a_running_job_that_is_cancelled_ends_quickly(site: Site) -> None:
    client = site.client
    job_id = submit(client, plain_job("gated"))
    (child,) = wait_for_start(site.folder)
    first = cancel(client, job_id)
    assert first["cancel_requested_at"] is not None
    wait_until_gone(child, timeout_s=CANCELLED_S)
    job = wait_for_state(client, job_id, "cancelled")
    assert job["error"]["code"] == "cancelled"
    again = cancel(client, job_id)
    assert (again["state"], again["cancel_requested_at"]) == ("cancelled", first["cancel_requested_at"])
    assert attempt_states(client, job_id) == ["cancelled"]
    # The worker is free again, and nothing comes after the end.
    wait_for_state(client, submit(client, plain_job("counted")), "succeeded")
    assert get(client, f"/jobs/{job_id}") == job
    assert get(client, f"/jobs/{job_id}/events")[-1]["data"]["state"] == "cancelled"


def test_a_cancel_that_was_answered_is_never_overwritten(site: Site, rng: random.Random) -> None:
    """Cancel jobs at the moment of their finish, often: what was answered holds, and 409 names the state."""
    rounds = 10
    client, folder = site.client, site.folder
    outcomes = []
    for number in range(1, rounds + 1):
        job_id = submit(client, plain_job("gated"))
        (child,) = wait_for_start(folder, number)
        if number < rounds:
            open_gate(folder, child)
            time.sleep(rng.uniform(0.0, 0.08))
        answer = client.post(f"/jobs/{job_id}/cancel")
        open_gate(folder, child)  # on a busy machine only the last cancel may come before the finish
        expected = "cancelled" if answer.status_code == 202 else "succeeded"
        job = wait_for_job(client, job_id)
        assert (answer.status_code, job["state"]) in {(202, "cancelled"), (409, "succeeded")}
        outcomes.append((job_id, expected))
    print(f"cancelled {[state for _, state in outcomes].count('cancelled')} of {rounds}")
    for job_id, expected in outcomes:
        job = get(client, f"/jobs/{job_id}")
        assert job["state"] == expected
        assert attempt_states(client, job_id) == [expected]
        assert cancel(client, job_id, 202 if expected == "cancelled" else 409)
        rows = get(client, f"/jobs/{job_id}/measurements")["rows"]
        assert {row["partial"] for row in rows} <= {expected == "cancelled"}
        assert get(client, f"/jobs/{job_id}") == job


def test_a_timeout_ends_every_descendant(site: Site) -> None:
    """Let the time of a job run out that ignores SIGTERM, and whose daemon in a session of its own does, too."""
    client = site.client
    timeout_s = 4.0
    job_id = submit(client, plain_job("stubborn", timeout_s=timeout_s))
    child, daemon = wait_for_start(site.folder)
    assert is_alive(child)
    assert is_alive(daemon)
    wait_until(lambda: os.getsid(daemon) != os.getsid(child), timeout_s=PATIENCE_S, what="a session of its own")
    wait_until_gone(child, daemon, timeout_s=timeout_s + GRACE_S + PATIENCE_S)
    job = wait_for_state(client, job_id, "failed")
    assert job["error"]["code"] == "timeout"
    assert "4 s" in job["error"]["detail"]
    assert attempt_states(client, job_id) == ["failed"]
    wait_for_state(client, submit(client, plain_job("counted")), "succeeded")


@pytest.mark.parametrize("mechanism", ["subreaper", "kill_after_terminate"])
def test_control_of_the_timeout(beside: Service, start_beside: Callable[..., Site], mechanism: str) -> None:
    with fails_without(beside, mechanism, match="to be gone"), patch.dict(globals(), PATIENCE_S=2.0):
        test_a_timeout_ends_every_descendant(start_beside())
