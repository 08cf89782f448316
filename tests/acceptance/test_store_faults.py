"""The store after a crash and on a full disk: torn logs give a consistent prefix, files are whole or not there."""

import hashlib
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.errors import DiskFull
from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import Database, open_database
from app.store.files.artifacts import ArtifactFiles
from app.store.queue.transitions import Queue
from app.store.records import Finish, NewEvent, NewJob, Offer
from tests.acceptance.faults import TINY, State, damage, database_path, state_of
from tests.acceptance.sabotage import get, sabotaged
from tests.builders import measurement
from tests.disks import file_size_limit, small_disk
from tools.service import Service

pytestmark = pytest.mark.acceptance

OFFER = Offer(
    kinds=frozenset({"benchmark"}),
    capabilities=frozenset({"model:transformer_lm", "attention:eager"}),
    total_gpus=0,
    free_gpus=0,
    idle=True,
)
OPERATIONS = 40
AUTOMATIC_CHECKPOINT_FRAMES = 1000
WAL_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
"""https://sqlite.org/fileformat.html#walformat"""
FULL_LOG_BYTES = 800 * (FRAME_HEADER_BYTES + 4096)
"""Leaves room for what one more change writes before SQLite's automatic checkpoint."""


class History:
    """A database as it was after each of many committed changes, and its files as kill -9 left them."""

    def __init__(self, folder: Path, states: list[State]) -> None:
        self.folder = folder
        self.states = states
        self.wal = (folder / "flopwatch.sqlite3-wal").read_bytes()
        (page_bytes,) = struct.unpack(">I", self.wal[8:12])
        self.frame_bytes = FRAME_HEADER_BYTES + page_bytes
        starts = range(WAL_HEADER_BYTES, len(self.wal) - self.frame_bytes + 1, self.frame_bytes)
        # The log's last frame of a transaction has the size of the database in its header.
        self.commit_ends = [start + self.frame_bytes for start in starts if any(self.wal[start + 4 : start + 8])]

    def damaged(self, rng: random.Random) -> Iterator[tuple[str, bytes]]:
        """Logs that a crash may leave: cut anywhere, flipped bits, garbage or zeros at the end."""
        size = len(self.wal)
        for end in [0, *rng.sample(self.commit_ends, 10)]:
            yield f"cut at {end}", self.wal[:end]
        for end in rng.sample(range(size), 6):
            yield f"cut at {end}", self.wal[:end]
        for at in rng.sample(range(size), 6):
            flipped = bytearray(self.wal)
            flipped[at] ^= 1 << rng.randrange(8)
            yield f"flipped a bit at {at}", bytes(flipped)
        for at in rng.sample(range(size), 3):
            yield f"garbage from {at}", self.wal[:at] + rng.randbytes(size - at)
            yield f"zeros from {at}", self.wal[:at] + bytes(size - at)


def make_history(service: Service, rng: random.Random, **environment: str) -> History:
    """Change a database through a real server, and as a worker; kill the server with everything still in the log."""
    # Nobody renews leases here: none may end on a busy host, which would be a change that this history lacks.
    client = service.start_server(FLOPWATCH_LEASE_S="3600", **environment)
    path = database_path(service)
    with closing(Database(f"sqlite:///{path}")) as database:
        queue = Queue(database)
        claims: list[Any] = []
        states = [state_of(path)]

        def submit() -> None:
            number = len(states)
            body = {"spec": TINY, "name": f"job {number}", "labels": {"number": str(number), "odd": str(number % 2)}}
            client.post("/jobs", json=body, headers={"Idempotency-Key": f"key-{number}"}).raise_for_status()

        def submit_sweep() -> None:
            body = {"base": TINY, "grid": {"context_length": [8, 16, 32]}, "labels": {"of": "sweep"}}
            client.post("/sweeps", json=body).raise_for_status()

        def cancel() -> None:
            job = rng.choice(get(client, "/jobs"))
            client.post(f"/jobs/{job['id']}/cancel")

        def claim() -> None:
            if (found := queue.claim("worker", OFFER)) is not None:
                claims.append(found)

        def report() -> None:
            for held in claims:
                queue.report(held, [NewEvent("progress", {"done": 1, "total": 2, "message": "half"})])

        def finish() -> None:
            if claims:
                ended = Finish("succeeded", measurements=[measurement(case={"n": 1})] * 3)
                queue.finish(claims.pop(rng.randrange(len(claims))), ended)

        operations: list[Callable[[], None]] = [submit, submit, submit, submit_sweep, cancel, claim, claim, finish]
        submit()
        states.append(state_of(path))
        log = path.with_name(f"{path.name}-wal")
        for _ in range(OPERATIONS):
            if log.stat().st_size > FULL_LOG_BYTES:
                break  # a checkpoint would move it into the database
            operation = rng.choice([*operations, report] if len(claims) == 1 else operations)
            operation()
            states.append(state_of(path))
        service.server.kill()
        service.server.wait()
        copy = service.folder / "killed"
        copy.mkdir()
        # By another process: closing a copy of the file here would drop SQLite's locks on it. And before the last
        # connection is closed, since that empties the log.
        subprocess.run(["cp", path, f"{path}-wal", copy], check=True)
    history = History(copy, states)
    assert 0 < len(history.wal) // history.frame_bytes < AUTOMATIC_CHECKPOINT_FRAMES
    return history


def inconsistent(history: History, rng: random.Random, folder: Path) -> Iterator[str]:
    """Which damaged logs do not open as the database was after some change."""
    for number, (what, wal) in enumerate(history.damaged(rng)):
        data_dir = folder / str(number)
        data_dir.mkdir(parents=True)
        path = data_dir / "flopwatch.sqlite3"
        shutil.copy(history.folder / path.name, path)
        path.with_name(f"{path.name}-wal").write_bytes(wal)
        with closing(open_database(Settings(data_dir=data_dir))) as database:
            state = state_of(path)
            if state not in history.states:
                yield f"{what}: the database was never like this"
            yield from (f"{what}: {problem}" for problem in damage(path))
            yield from (f"{what}, and then used: {problem}" for problem in going_on(database, path))
        shutil.rmtree(data_dir)


def going_on(database: Database, path: Path) -> list[str]:
    """What is wrong when the queue is used."""
    queue = Queue(database)
    submitted = queue.submit(NewJob(spec_adapter.validate_python(TINY), priority=1000)).response
    claim = queue.claim("another worker", OFFER)
    if claim is None or claim.job_id != submitted["id"]:
        return [f"submitted job {submitted['id']}, claimed {claim}"]
    state = queue.finish(claim, Finish("succeeded"))
    return ([] if state == "succeeded" else [f"finished as {state}"]) + damage(path)


def test_a_torn_log_gives_a_consistent_prefix(service: Service, rng: random.Random, tmp_path: Path) -> None:
    history = make_history(service, rng)
    assert len(history.commit_ends) > OPERATIONS / 2
    assert list(inconsistent(history, rng, tmp_path / "torn")) == []


def test_control_a_torn_log_of_single_statements_does_not(service: Service, rng: random.Random, tmp_path: Path) -> None:
    assert any(inconsistent(make_history(service, rng, **sabotaged("transaction")), rng, tmp_path / "torn"))


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_file_that_does_not_fit_leaves_nothing(tmp_path: Path, rng: random.Random, how: str) -> None:
    folder, large, small = (tmp_path / name for name in ("artifacts", "large", "small"))
    large.write_bytes(rng.randbytes(3 << 20))
    small.write_bytes(rng.randbytes(1000))
    with small_disk(folder, "size=2m") if how == "disk" else file_size_limit(os.getpid(), 1 << 20):
        files = ArtifactFiles(folder)
        for _ in range(2):
            with pytest.raises(DiskFull):
                files.put(large)
            files.put(small)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert sizes == [1000]


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_control_a_file_copied_in_place_leaves_a_half(tmp_path, rng, monkeypatch, how: str) -> None:
    def stored(self: ArtifactFiles, reader: Any, _check: Any) -> tuple[str, int]:
        content = reader.read()
        sha256 = hashlib.sha256(content).hexdigest()
        self._make_folder(self._path(sha256).parent)
        self._path(sha256).write_bytes(content)
        self._hold(sha256)
        return sha256, len(content)

    monkeypatch.setattr(ArtifactFiles, "_stored", stored)
    with pytest.raises((AssertionError, DiskFull)):  # a half is left, and maybe no room for the small file
        test_a_file_that_does_not_fit_leaves_nothing(tmp_path, rng, how)
