"""The queue between real processes: nothing runs twice, nothing is lost, and what was answered is there."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import NewJob
from tests.forked import PROJECT, forkserver
from tools.waiting import wait_until

CLAIMANT = Path(__file__).with_name("claimant.py")
JOBS = 60
MANY = 1_000_000
"""More jobs than anybody submits before this process gets to the kill."""

SUBMITTER = """
import sys
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.records import NewJob
queue = Queue(Database(sys.argv[1], busy_timeout_s=30))
while True:
    print(queue.submit(NewJob(BenchmarkSpec(), labels={"a": "b"})).response["id"], flush=True)
"""


def run_claimants(url: str, number: int, *options: str) -> list[list[int]]:
    """What each of several processes ran, all let go at once."""
    command = [sys.executable, str(CLAIMANT), url, str(number), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    ran: list[list[int]] = json.loads(done.stdout)
    assert len(ran) == number
    return ran


def each_ran_once(ran: list[list[int]], reading: Reading) -> bool:
    times = Counter(job_id for ids in ran for job_id in ids)
    jobs, _ = reading.jobs(limit=1000)
    return (
        len(times) == JOBS
        and set(times.values()) == {1}
        and all(job["state"] == "succeeded" and job["attempt"] == 1 for job in jobs)
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("--sabotage",)], ids=["as it is", "without lock, transaction and condition"])
def test_several_workers_run_each_job_once(
    database: Database, queue: Queue, reading: Reading, options: tuple[str, ...]
) -> None:
    queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec())] * JOBS)
    ran = run_claimants(database.url, 3, *options)
    assert each_ran_once(ran, reading) == (not options)


@pytest.mark.timeout(120)
def test_what_was_answered_survives_kill_9(
    database: Database, queue: Queue, reading: Reading, rng: random.Random, tmp_path: Path
) -> None:
    for number in range(2):
        output = tmp_path / f"answered-{number}"
        process = forkserver().start(["-c", SUBMITTER, database.url], {"PYTHONPATH": str(PROJECT)}, output)
        wait_until(lambda output=output: output.exists() and "\n" in output.read_text(), "the first answer", 60)
        time.sleep(rng.uniform(0, 0.2))  # any moment will do
        process.kill()
        process.wait(60)
        answered = [int(line) for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = {job["id"]: job for job in reading.jobs(limit=MANY)[0]}
        assert set(answered) <= set(found)
        for job_id in found:
            assert [event["type"] for event in reading.events(job_id)] == ["state"]
        labelled = {job["id"] for job in reading.jobs(labels=[("a", "b")], limit=MANY)[0]}
        assert labelled == set(found)
    # A killed writer leaves no lock behind.
    queue.submit(NewJob(BenchmarkSpec()))
