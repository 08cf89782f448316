"""Jobs whose process dies, by itself or by force."""

import os
import random
import signal
import time
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Site, short_job
from tests.acceptance.sabotage import attempt_states, plain_job, wait_for_start
from tools.service import submit, wait_for_job

pytestmark = pytest.mark.acceptance


def failed(client: httpx.Client, job_id: int) -> dict[str, Any]:
    """The error of a job that must fail at its first attempt, with the log's head and tail."""
    ended = wait_for_job(client, job_id)
    assert ended["state"] == "failed"
    assert ended["attempt"] == 1, "only lost workers are tried again"
    assert attempt_states(client, job_id) == ["failed"]
    error: dict[str, Any] = ended["error"]
    assert error["log_head"] in client.get(f"/jobs/{job_id}/logs").text
    return error


def test_how_a_job_died_is_told(site: Site, rng: random.Random) -> None:
    client = site.client
    killed = submit(client, plain_job("gated"))
    (child,) = wait_for_start(site.folder)
    time.sleep(rng.uniform(0.0, 0.2))
    os.kill(child, signal.SIGKILL)
    error = failed(client, killed)
    assert (error["code"], error["signal"], error["exit_code"]) == ("crashed", "SIGKILL", None)

    error = failed(client, submit(client, plain_job("segfault", start=rng.choice(["fork", "exec"]))))
    assert (error["code"], error["signal"], error["exit_code"]) == ("crashed", "SIGSEGV", None)
    assert "SIGSEGV" in error["detail"]
    stacks = "--- stacks of the job's process ---\nFatal Python error: Segmentation fault"
    assert f"about to fall over\n{stacks}" in error["log_tail"]
    assert "in fall_over" in error["log_tail"]

    error = failed(client, submit(client, short_job("exits")))
    assert (error["code"], error["signal"], error["exit_code"]) == ("crashed", None, 3)
    assert "exit code 3" in error["detail"]

    error = failed(client, submit(client, short_job("raises")))
    assert (error["code"], error["detail"]) == ("failed", "ValueError: the loss is a pineapple")
    assert "Traceback" in error["log_tail"]

    assert wait_for_job(client, submit(client, plain_job("counted")))["state"] == "succeeded", "the worker must go on"
