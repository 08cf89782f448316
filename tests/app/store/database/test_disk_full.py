"""A full disk: a small file system, where this user may mount one.

tests/acceptance/test_server_faults.py fills a server's disk, and limits the size of its files.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import DiskFull
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.files.artifacts import ArtifactFiles
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, NewJob, StoredArtifact
from tests.app.store.conftest import Shop
from tests.disks import full, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "small", "size=2m") as folder:
        yield folder


def test_a_disk_that_is_full(disk: Path, tmp_path: Path) -> None:
    database = open_database(Settings(data_dir=disk))
    queue, reading, files = Queue(database), Reading(database), ArtifactFiles(disk / "artifacts")
    claim = Shop(queue, Registration(database)).running_job()
    big, small = tmp_path / "big", tmp_path / "small-file"
    big.write_bytes(bytes(4 << 20))
    small.write_bytes(b"small")
    with pytest.raises(DiskFull):
        files.put(big)
    assert [path for path in (disk / "artifacts").rglob("*") if path.is_file()] == []
    sha256, size = files.put(small)  # the space is free again

    artifact = StoredArtifact(0, "a", "trace", "text/plain", size, sha256)
    finish = Finish("succeeded", artifacts=[artifact], log="x" * 100_000)
    with full(disk):
        with pytest.raises(DiskFull):
            submit_many(queue)
        with pytest.raises(DiskFull):
            queue.finish(claim, finish)
        assert reading.job(claim.job_id)[0]["state"] == "running"
        assert reading.artifacts(claim.job_id) == []
        check_integrity(database)
    assert queue.finish(claim, finish) == "succeeded"
    assert files.open_path(reading.artifact(claim.job_id, "a")["sha256"]).read_bytes() == b"small"
    check_integrity(database)
    database.close()


def submit_many(queue: Queue) -> None:
    for _ in range(1000):
        queue.submit(NewJob(BenchmarkSpec()))


def check_integrity(database: Database) -> None:
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
