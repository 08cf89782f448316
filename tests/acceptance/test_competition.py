"""Two workers on one queue: every job runs once, and on one host one at a time. The controls let workers look for a job
and take it in two steps, and not know that they share a host."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.acceptance.sabotage import (
    attempt_states,
    get,
    open_gate,
    other_host,
    plain_job,
    plain_kind,
    wait_for_start,
    wait_for_state,
    worker_id,
)
from tools.service import Service, submit
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

JOBS = 8
ALONE_JOBS = 8
PATIENCE_S = 300.0


def run_all_once(service: Service, folder: Path, rng: random.Random, jobs: int, *mechanisms: str) -> None:
    """Let two workers run numbered short jobs of random priorities."""
    client = service.client()
    numbers = range(jobs)
    # On two hosts, as far as the workers know: those of one host take turns, since a CPU measurement runs alone.
    workers = service.start_workers(
        *({**plain_kind(*mechanisms), **other_host(folder / name)} for name in ("first", "second"))
    )
    # Each worker has a job when the race begins: one that the host lets wait could find all jobs taken.
    ids = [submit(client, plain_job("gated")) for _ in workers]
    wait_for_start(folder, len(ids))
    ids += [submit(client, plain_job("counted", number=number, priority=rng.randint(-2, 2))) for number in numbers]
    open_gate(folder)
    wait_until(
        lambda: get(client, "/jobs?state=queued&limit=1") + get(client, "/jobs?state=running&limit=1") == [],
        timeout_s=PATIENCE_S,
        what="all jobs to end",
        poll_s=0.1,
    )
    runs = Counter(map(int, (folder / "runs").read_text().split()))
    assert {number: count for number, count in runs.items() if count > 1} == {}, "run twice"
    assert set(numbers) - runs.keys() == set(), "lost"
    ended = [job for job in get(client, "/jobs?limit=200") if job["id"] >= ids[0]]
    assert sorted(job["id"] for job in ended) == ids
    assert {(job["state"], job["attempt"]) for job in ended} == {("succeeded", 1)}
    assert all(attempt_states(client, job_id) == ["succeeded"] for job_id in ids)
    shares = Counter(job["worker_id"] for job in ended)
    print(f"shares: {sorted(shares.values())}")
    assert shares.keys() == {worker_id(client, worker.pid) for worker in workers}


def test_two_workers_run_every_job_once(beside: Service, misbehave_folder: Path, rng: random.Random) -> None:
    run_all_once(beside, misbehave_folder, rng, JOBS)


def test_control_a_claim_in_two_steps(beside: Service, misbehave_folder: Path, rng: random.Random) -> None:
    with pytest.raises(AssertionError, match="run twice"):
        run_all_once(beside, misbehave_folder, rng, JOBS, "atomic_claim")


def measures_alone(service: Service, folder: Path, jobs: int, *hosts: str) -> None:
    """Let two workers run jobs on the CPU; they are on the same host if their hosts' names are equal."""
    client = service.client()
    workers = service.start_workers(*(other_host(folder / host) for host in hosts))
    ids = [submit(client, plain_job("alone")) for _ in range(jobs)]
    ended = []
    for job_id in ids:
        ended.append(wait_for_state(client, job_id, "succeeded"))
        assert not (folder / "overlaps").exists(), "two jobs ran at the same time"
    assert {job["worker_id"] for job in ended} <= {worker_id(client, worker.pid) for worker in workers}


def test_cpu_jobs_of_one_host_run_one_at_a_time(beside: Service, misbehave_folder: Path) -> None:
    measures_alone(beside, misbehave_folder, ALONE_JOBS, "host", "host")


def test_control_cpu_jobs_of_two_hosts_overlap(beside: Service, misbehave_folder: Path) -> None:
    with pytest.raises(AssertionError, match="at the same time"):
        measures_alone(beside, misbehave_folder, 5 * ALONE_JOBS, "first", "second")
