"""What the tests of workers share: sabotaged processes, and what they look at to see what the processes did."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest

from tests.acceptance.conftest import PLUGINS, PROJECT
from tests.processes import alive, is_alive
from tools.service import FINAL_STATES, Service
from tools.waiting import wait_until

POLL_S = 0.05
"""Between two questions to a server, which take it and the test some milliseconds of processor time each."""


def sabotaged(*mechanisms: str, **environment: str) -> dict[str, str]:
    """Environment of a process that lacks these mechanisms (see tests/plugins/sabotage)."""
    path = os.pathsep.join(map(str, (PLUGINS / "sabotage", PROJECT, PLUGINS)))
    named = {"SABOTAGE": ",".join(mechanisms)} if mechanisms else {}
    return {**named, "PYTHONPATH": path, **environment}


def plain_kind(*mechanisms: str, **environment: str) -> dict[str, str]:
    """Environment of a process that lacks these mechanisms and knows the kind of tests/plugins/plain_kind.

    Workers that are killed and started again are ready sooner where nothing imports torch.
    """
    folders = [PLUGINS / "plain_kind", PROJECT, PLUGINS]
    return sabotaged(*mechanisms, PYTHONPATH=os.pathsep.join(map(str, folders)), **environment)


@contextmanager
def fails_without(service: Service, *mechanisms: str, match: str) -> Iterator[None]:
    """Take these mechanisms out of what the service starts inside; the test there must fail, with this text.

    What the models of tests/plugins have started, and its keepers, is killed: a sabotaged worker leaves it.
    """
    failures = (AssertionError, TimeoutError)
    try:
        with patch.dict(service.environment, plain_kind(*mechanisms)), pytest.raises(failures, match=match):
            yield
    finally:
        for pid in [pid for line in started(Path(service.environment["MISBEHAVE_FOLDER"])) for pid in line]:
            with suppress(psutil.NoSuchProcess):  # the worker may end it meanwhile
                parent = psutil.Process(pid).parent() if is_alive(pid) else None
                if parent is not None and {"keeper", "warm"} & set(parent.cmdline()):
                    parent.kill()
            kill(pid)


def plain_job(behaviour: str, *, number: int = 0, start: str = "fork", **fields: Any) -> dict[str, Any]:
    """The body of a job of that kind."""
    return {"spec": {"kind": "plain", "behaviour": behaviour, "number": number, "start": start}, **fields}


def other_host(folder: Path) -> dict[str, str]:
    """Environment of a worker that competes with the first as if it were on another host.

    Workers of one host share the folder of device locks below TMPDIR, so that only one at a time measures on the CPU.
    """
    folder.mkdir(exist_ok=True)
    return {"TMPDIR": str(folder)}


def kill(*pids: int) -> None:
    """Send SIGKILL to those that run."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def started(folder: Path) -> list[list[int]]:
    """The pids that gated and stubborn models and jobs wrote down, one list per start."""
    path = folder / "started"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(pid) for pid in line.split()] for line in lines]


def wait_for_start(folder: Path, number: int = 1, *, timeout_s: float = 60.0) -> list[int]:
    """The pids of start `number`, once it has happened."""
    wait_until(lambda: len(started(folder)) >= number, timeout_s=timeout_s, what=f"start {number} of a model")
    return started(folder)[number - 1]


def wait_until_gone(*pids: int, timeout_s: float) -> None:
    """Wait for the end of these processes."""
    wait_until(lambda: not alive(pids), timeout_s=timeout_s, what=f"processes {pids} to be gone", poll_s=0.002)


def open_gate(folder: Path, pid: int | None = None) -> None:
    """Let gated models finish: all, or the one in process `pid`."""
    (folder / ("open" if pid is None else f"open-{pid}")).touch()


def get(client: httpx.Client, path: str) -> Any:
    """The JSON answer to a GET; of a list its data."""
    answer = client.get(path).raise_for_status().json()
    return answer["data"] if isinstance(answer, dict) and "data" in answer else answer


def attempt_states(client: httpx.Client, job_id: int) -> list[str]:
    """How each attempt of the job ended, or "running"."""
    return [attempt["state"] for attempt in get(client, f"/jobs/{job_id}/attempts")]


def wait_for_state(client: httpx.Client, job_id: int, *states: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """The job, once it is in one of these states; an AssertionError when it has ended in another."""

    def there() -> dict[str, Any] | None:
        job: dict[str, Any] = get(client, f"/jobs/{job_id}")
        assert job["state"] in states or job["state"] not in FINAL_STATES, f"job {job_id}: {job}"
        return job if job["state"] in states else None

    return wait_until(there, timeout_s=timeout_s, what=f"job {job_id} to be {' or '.join(states)}", poll_s=POLL_S)


def worker_id(client: httpx.Client, pid: int) -> str:
    """The id under which the worker of process `pid` is registered."""
    return next(str(worker["id"]) for worker in get(client, "/workers") if worker["pid"] == pid)
