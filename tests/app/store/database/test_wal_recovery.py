"""A log that was torn when the machine went down: what is left is a consistent prefix of what was committed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, NewJob, Offer

JOBS = 25
OFFER = Offer(frozenset({"benchmark"}), frozenset(), 0, 0, idle=True)


@pytest.fixture
def files(settings: Settings, queue: Queue) -> tuple[Path, Path]:
    """The database and its log as they lie on the disk while every third job is done."""
    for number in range(JOBS):
        queue.submit(NewJob(BenchmarkSpec(), labels={"number": str(number)}))
        if number % 3 == 2:
            claim = queue.claim("worker", OFFER)
            assert claim is not None
            queue.finish(claim, Finish("succeeded", log="done"))
    path = settings.data_dir / "flopwatch.sqlite3"
    wal = path.with_name(path.name + "-wal")
    assert wal.stat().st_size > 100_000  # nothing was checkpointed: all is in the log
    return path, wal


def tear(content: bytes, rng: random.Random) -> bytes:
    """Cut off at any byte, or with some bytes overwritten, or both."""
    if rng.random() < 0.7:
        content = content[: rng.randrange(len(content) + 1)]
    if content and rng.random() < 0.6:
        at = rng.randrange(len(content))
        length = min(rng.randrange(1, 5000), len(content) - at)
        content = content[:at] + rng.randbytes(length) + content[at + length :]
    return content


def test_a_torn_log_leaves_a_consistent_prefix(files: tuple[Path, Path], tmp_path: Path, rng: random.Random) -> None:
    path, wal = files
    log = wal.read_bytes()
    counts = set()
    for number in range(25):
        copy = tmp_path / f"torn{number}.sqlite3"
        shutil.copy(path, copy)
        copy.with_name(copy.name + "-wal").write_bytes(tear(log, rng))
        database = Database(f"sqlite:///{copy}")
        with database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        reading = Reading(database)
        jobs = sorted(reading.jobs(limit=1000)[0], key=lambda job: job["id"])
        assert [job["labels"]["number"] for job in jobs] == [str(index) for index in range(len(jobs))]
        for job in jobs:
            states = [event["data"]["state"] for event in reading.events(job["id"]) if event["type"] == "state"]
            assert states == ["queued", "running", "succeeded"][: len(states)]
            assert job["state"] == states[-1]
            assert (reading.log(job["id"]) == "done") == (job["state"] == "succeeded")
        # And it is a database that one can go on with.
        Queue(database).submit(NewJob(BenchmarkSpec()))
        counts.add(len(jobs))
        database.close()
    assert len(counts) > 3, f"every log was torn at the same place: {counts}"
