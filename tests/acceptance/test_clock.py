"""A wall clock that jumps while a job runs: leases are none of its business."""

import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from app.store import tables
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
    wait_for_state,
    worker_id,
)
from tools.service import Service, submit
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

LEASE_S = 3.0
"""A machine may let a worker wait for two seconds, which must not lose it."""
HOUR_S = 3600.0
PATIENCE_S = 20.0


def renewed_or_lost(service: Service, client: httpx.Client, job_id: int, beats: int) -> bool:
    """Whether the lease of the job's first attempt was renewed so often, or has ended."""
    return beats_of(service, job_id) >= beats or attempt_states(client, job_id) != ["running"]


def beats_of(service: Service, job_id: int) -> int:
    """How often the leases of the job's attempts were renewed."""
    database = Database(service.settings().resolved_database_url)
    attempt = tables.attempt.c
    try:
        with database.read() as connection:
            return sum(connection.execute(select(attempt.beat).where(attempt.job_id == job_id)).scalars())
    finally:
        database.close()


def move(clock: Path, seconds: float) -> None:
    """Let the wall clock of the processes that read this file be off by so much."""
    written = clock.with_suffix(".new")
    written.write_text(str(seconds))
    written.replace(clock)


@dataclass(frozen=True)
class Moved:
    """A service of whose processes a test moves the clock: of all, or of some."""

    service: Service
    client: httpx.Client
    workers: list[subprocess.Popen[bytes]]
    clock: Path


def keeps_its_lease(service: Service, folder: Path, hours: Sequence[int]) -> None:
    """Let the clock of a server and two workers be off by these hours, one after the other, while a job runs."""
    clock = service.folder / "clock"
    moved = plain_kind(MOVED_CLOCK=str(clock), FLOPWATCH_LEASE_S=str(LEASE_S))
    client = service.start_server(**moved)
    workers = service.start_workers(*({**moved, **other_host(service.folder / name)} for name in ("first", "second")))
    job_id = submit(client, plain_job("gated"))
    stays_its_workers(Moved(service, client, workers, clock), job_id, folder, hours)


def test_a_clock_that_jumps_expires_nothing(service: Service, misbehave_folder: Path, rng: random.Random) -> None:
    keeps_its_lease(service, misbehave_folder, rng.sample([-2, -1, 1, 2], 3))


# A renewal between a jump and the next look of a watcher hides the fault, about every fourth time.
@pytest.mark.parametrize(("hours", "wrong"), [(range(1, 10), "a lease has expired"), ([-1], "its second attempt")])
def test_control_of_the_monotonic_clock(service: Service, misbehave_folder: Path, hours, wrong: str) -> None:
    with fails_without(service, "monotonic_clock", match=wrong):
        keeps_its_lease(service, misbehave_folder, hours)


def stays_its_workers(moved: Moved, job_id: int, folder: Path, hours: Sequence, *, tells_time: bool = True) -> None:
    """Let the clock jump while this job runs.

    Just before the last jump the job's worker is killed: it must be found lost nevertheless. `tells_time`: whether the
    job's times go by this clock, and not by the database's.
    """
    print(f"the clock is off by {hours} hours")
    client = moved.client
    first_id = wait_for_state(client, job_id, "running")["worker_id"]
    for hour in hours[:-1]:
        # Renewals come three times a lease and looks of the watchers four times: these see the new time.
        renewed = beats_of(moved.service, job_id) + 3
        move(moved.clock, hour * HOUR_S)
        enough = partial(renewed_or_lost, moved.service, client, job_id, renewed)
        wait_until(enough, timeout_s=PATIENCE_S, what="renewals", poll_s=0.1)
        job = get(client, f"/jobs/{job_id}")
        assert (job["state"], job["attempt"], job["worker_id"]) == ("running", 1, first_id), "a lease has expired"
    (lost,) = [worker for worker in moved.workers if worker_id(client, worker.pid) == first_id]
    lost.kill()
    move(moved.clock, hours[-1] * HOUR_S)
    wait_until(
        lambda: attempt_states(client, job_id) == ["lost", "running"], "its second attempt", PATIENCE_S, poll_s=POLL_S
    )
    open_gate(folder)
    job = wait_for_state(client, job_id, "succeeded")
    assert attempt_states(client, job_id) == ["lost", "succeeded"]
    took = datetime.fromisoformat(job["finished_at"]) - datetime.fromisoformat(job["created_at"])
    assert not tells_time or abs(took.total_seconds() - hours[-1] * HOUR_S) < HOUR_S / 2, "the clock must have moved"
