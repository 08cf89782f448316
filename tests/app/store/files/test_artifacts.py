import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.errors import NotFound
from app.store.database.engine import Database
from app.store.files import artifacts
from app.store.files.artifacts import ArtifactFiles
from app.store.files.owner import NOTE
from app.store.keeping.deleting import delete_job
from app.store.queue.transitions import Queue
from app.store.records import Finish, StoredArtifact


@pytest.fixture
def engine() -> str:
    """Files on a disk belong to one host."""
    return "sqlite"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def files(folder: Path, database: Database) -> ArtifactFiles:
    files = ArtifactFiles(folder)
    files.claim(database)
    return files


SHA256 = hashlib.sha256(b"trace").hexdigest()


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != NOTE]


def finish_with(queue: Queue, shop: Any, sha256: str) -> int:
    claim = shop.running_job()
    queue.finish(claim, Finish("succeeded", artifacts=[StoredArtifact(0, "t", "trace", "text/plain", 5, sha256)]))
    return int(claim.job_id)


def test_the_same_content_is_stored_once(files: ArtifactFiles, folder: Path, trace: Path) -> None:
    files.put(trace)
    assert files.put(trace) == (SHA256, 5)
    assert len(stored(folder)) == 1


def test_what_is_no_content_is_not_found(files: ArtifactFiles) -> None:
    for name in (SHA256, "../../etc/passwd", "", SHA256.upper(), "ab/" + SHA256[3:]):
        with pytest.raises(NotFound):
            files.open_path(name)


def test_a_copy_that_fails_leaves_nothing(files: ArtifactFiles, folder: Path, trace: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.put(trace.with_name("none"))
    assert stored(folder) == []


def steps_in_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed from now on."""
    order: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        order.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "file")
        sync(descriptor)

    def replace(path: Path, target: Path) -> None:
        order.append("name")
        rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return order


def test_everything_is_synced_before_it_has_its_name(files, trace, monkeypatch) -> None:
    order = steps_in_order(monkeypatch)
    files.put(trace)
    assert order == ["file", "folder", "name", "folder"]


def test_a_stored_file_is_its_owners_and_nobody_can_change_it(files, folder, trace) -> None:
    trace.chmod(0o4777)
    former = os.umask(0)
    try:
        with trace.open("r+b") as of_a_process_that_lives_on:
            assert files.put(trace) == (SHA256, 5)
            of_a_process_that_lives_on.write(b"other")
    finally:
        os.umask(former)
    (content,) = stored(folder)
    assert (content, content.read_bytes()) == (files.open_path(SHA256), b"trace")
    assert content.stat().st_mode & 0o7777 == 0o600
    folders = [folder, content.parent, folder / "incoming"]
    assert {path.stat().st_mode & 0o7777 for path in folders} == {0o700}


def stopping_after(size: int) -> Callable[[int], None]:
    def check(read: int) -> None:
        if read > size:
            raise InterruptedError(f"{read} bytes are too many")

    return check


class TestCheck:
    """A caller can stop a file of any size before it is read, and at each chunk."""

    def test_a_huge_file_is_refused_unread(self, files, folder, trace, monkeypatch) -> None:
        os.truncate(trace, 100 << 30)  # sparse
        monkeypatch.setattr(artifacts, "_copy", None)
        with pytest.raises(InterruptedError, match=f"{100 << 30} bytes"):
            files.put(trace, stopping_after(1 << 30))
        assert trace.exists()
        assert stored(folder) == []

    def test_one_that_grows_is_left_at_a_chunk(self, files, folder, trace, monkeypatch) -> None:
        monkeypatch.setattr(artifacts, "CHUNK_BYTES", 1)
        sizes = []

        def check(size: int) -> None:
            sizes.append(size)
            if len(sizes) == 2:
                os.truncate(trace, 100 << 30)  # by a process that nobody knows of
            stopping_after(50)(size)

        with pytest.raises(InterruptedError):
            files.put(trace, check)
        assert sizes == [5, *range(1, 52)]
        assert trace.exists()
        assert stored(folder) == []

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_what_is_no_file_is_refused(self, files, folder, trace, kind) -> None:
        other = trace.with_name("other")
        if kind == "link":
            other.symlink_to(trace)
        else:
            os.mkfifo(other)
        with pytest.raises(OSError, match="symbolic links" if kind == "link" else "not a regular file"):
            files.put(other)
        assert stored(folder) == []


def test_many_held_files_take_one_descriptor(files: ArtifactFiles, database: Database) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    contents = [files.put_bytes(b"%d" % number)[0] for number in range(30)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    files.release(contents[:10])
    assert sorted(files.remove(contents, database)) == sorted(contents[:10])


class TestRemove:
    def test_held_files_stay_until_each_hold_ends(self, files, folder, trace, database) -> None:
        files.put(trace)
        files.put(trace)
        for _ in range(2):
            assert ArtifactFiles(folder).remove([SHA256], database) == []
            files.release([SHA256])
        assert ArtifactFiles(folder).remove([SHA256], database) == [SHA256]

    def test_a_process_that_ends_releases_what_it_held(self, files, folder, trace, database) -> None:
        program = (
            "import sys; from pathlib import Path; from app.store.files.artifacts import ArtifactFiles\n"
            "ArtifactFiles(Path(sys.argv[1])).put(Path(sys.argv[2])); print('put', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", program, str(folder), str(trace)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "put\n"
            assert files.remove([SHA256], database) == []
            process.kill()
        assert files.remove([SHA256], database) == [SHA256]

    def removals_take_nothing_that_is_used(self, files, trace, queue, shop, database) -> bool:
        """Put, finish and release against removals of the same content at every moment."""
        stop, removing, missing = threading.Event(), threading.Event(), []

        def remove() -> None:
            while not stop.is_set():
                files.remove([SHA256], database)
                removing.set()

        remover = threading.Thread(target=remove)
        remover.start()
        assert removing.wait(60)
        try:
            for _ in range(25):
                files.put(trace)
                time.sleep(0.001)
                job_id = finish_with(queue, shop, SHA256)
                files.release([SHA256])
                time.sleep(0.001)
                try:
                    files.open_path(SHA256)
                except NotFound:
                    missing.append(job_id)
                delete_job(database, job_id)
        finally:
            stop.set()
            remover.join()
        return not missing

    def test_removal_never_races_with_a_put_of_the_same_content(self, files, trace, queue, shop, database) -> None:
        assert self.removals_take_nothing_that_is_used(files, trace, queue, shop, database)

    @pytest.mark.long
    def test_without_holds_it_would(self, files, trace, queue, shop, database, monkeypatch) -> None:
        monkeypatch.setattr(artifacts, "try_exclusive", lambda *_: True)
        assert not self.removals_take_nothing_that_is_used(files, trace, queue, shop, database)


class TestOrphans:
    def age(self, path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds,) * 2)

    def test_old_orphans_are_swept_and_nothing_else(self, files, folder, queue, shop, database) -> None:
        contents = {}
        for name in ("referred", "held", "young", "orphan"):
            contents[name], _ = files.put_bytes(name.encode())
            if name != "held":
                files.release([contents[name]])
            if name != "young":
                self.age(files.open_path(contents[name]), 7200)
        finish_with(queue, shop, contents["referred"])
        for name, age in (("old", 7200), ("new", 0)):
            (folder / "incoming" / name).write_bytes(b"torn")
            self.age(folder / "incoming" / name, age)
        assert files.remove_unreferenced(database, older_than_s=3600) == [contents["orphan"]]
        left = {path.read_text() for path in stored(folder) if path.parent.name != "incoming"}
        assert left == {"referred", "held", "young"}
        assert [path.name for path in (folder / "incoming").iterdir()] == ["new"]
