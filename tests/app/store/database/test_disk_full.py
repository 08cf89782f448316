"""A full disk: a process with a file-size limit, and a small file system where this user may mount one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import DiskFull
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.files.artifacts import ArtifactFiles
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, NewJob, Offer, StoredArtifact

OFFER = Offer(frozenset({"benchmark"}), frozenset(), 0, 0, idle=True)

LIMITED = """
import json, resource, sys
from pathlib import Path
from app.errors import DiskFull
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.files.artifacts import ArtifactFiles
from app.store.database.engine import open_database
from app.store.queue.transitions import Queue
from app.store.records import NewJob
from app.store.reading.queries import Reading

settings = Settings.model_validate_json(sys.argv[1])
database = open_database(settings)
queue, reading, files = Queue(database), Reading(database), ArtifactFiles(settings.artifacts_dir)
trace = settings.data_dir / "trace"
trace.write_bytes(bytes(1_000_000))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))

answered, full = [], 0
while full < 3:
    try:
        answered.append(queue.submit(NewJob(BenchmarkSpec())).response["id"])
    except DiskFull as error:
        assert error.status == 507
        full += 1
    # Reads go on.
    assert reading.counts()["queued"] == len(answered)
try:
    files.put(trace)
except DiskFull:
    full += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
left = [str(path) for path in settings.artifacts_dir.rglob("*") if path.is_file()]
answered.append(queue.submit(NewJob(BenchmarkSpec())).response["id"])
files.put(trace)
print(json.dumps([answered, full, left]))
"""


def test_a_process_that_may_write_no_more(settings: Settings) -> None:
    command = [sys.executable, "-c", LIMITED, settings.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answered, full, left = json.loads(done.stdout)
    assert full == 4
    assert left == []
    database = open_database(settings)
    assert [job["id"] for job in reversed(Reading(database).jobs(limit=1000)[0])] == answered
    database.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system here; the file-size limit above tests the same code")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full(small_disk: Path, tmp_path: Path) -> None:
    database = open_database(Settings(data_dir=small_disk))
    queue, reading, files = Queue(database), Reading(database), ArtifactFiles(small_disk / "artifacts")
    queue.submit(NewJob(BenchmarkSpec()))
    claim = queue.claim("worker", OFFER)
    assert claim is not None
    big, small = tmp_path / "big", tmp_path / "small-file"
    big.write_bytes(bytes(4 << 20))
    small.write_bytes(b"small")
    with pytest.raises(DiskFull):
        files.put(big)
    assert [path for path in (small_disk / "artifacts").rglob("*") if path.is_file()] == []
    sha256, size = files.put(small)  # the space is free again

    filler = small_disk / "filler"
    fill(filler)
    with pytest.raises(DiskFull):
        submit_many(queue)
    artifact = StoredArtifact(0, "a", "trace", "text/plain", size, sha256)
    finish = Finish("succeeded", artifacts=[artifact], log="x" * 100_000)
    with pytest.raises(DiskFull):
        queue.finish(claim, finish)
    assert reading.job(claim.job_id)[0]["state"] == "running"
    assert reading.artifacts(claim.job_id) == []
    check_integrity(database)

    filler.unlink()
    assert queue.finish(claim, finish) == "succeeded"
    assert files.open_path(reading.artifact(claim.job_id, "a")["sha256"]).read_bytes() == b"small"
    check_integrity(database)
    database.close()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def submit_many(queue: Queue) -> None:
    for _ in range(1000):
        queue.submit(NewJob(BenchmarkSpec()))


def check_integrity(database: Database) -> None:
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
