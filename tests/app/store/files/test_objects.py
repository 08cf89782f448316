"""Files on an object store: moto's S3 server behind a network that tests cut."""

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from app.errors import CannotRunHere, Damaged, LeaseLost, NotFound, StorageFailed, StoreUnreachable
from app.store import tables
from app.store.database.engine import Database
from app.store.files import objects
from app.store.files.artifacts import ArtifactFiles
from app.store.files.objects import LIST_EVERY_S, PAUSE_S, Copied, ObjectFiles, copy_files
from app.store.files.uploads import Uploads
from app.store.keeping.deleting import delete_job
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish, StoredArtifact
from tests.app.store.conftest import ON_SQLITE
from tests.clock import Clock
from tests.databases import put_database
from tests.object_stores import SECRET, Bucket

LARGE = 6 << 20
"""Bytes of a file that is uploaded in two parts."""


@pytest.fixture
def files(bucket: Bucket, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> ObjectFiles:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    files = ObjectFiles(bucket.url, database, clock)
    files.claim(database)
    return files


def rows(database: Database) -> dict[str, Any]:
    """The SHA-256 of each object with a row, by its name."""
    with database.read() as connection:
        query = select(tables.stored_object.c.name, tables.stored_object.c.sha256)
        return {row.name: row.sha256 for row in connection.execute(query)}


def names(bucket: Bucket) -> set[str]:
    return {name.rpartition("/")[2] for name in bucket.names()}


def finish(queue: Queue, claim: Claim, *stored: tuple[str, int]) -> None:
    kept = [StoredArtifact(0, f"t{n}", "trace", "text/plain", size, sha) for n, (sha, size) in enumerate(stored)]
    queue.finish(claim, Finish("succeeded", artifacts=kept))


def all_of(content: Any, start: int = 0, stop: int | None = None) -> bytes:
    async def read() -> bytes:
        return b"".join([part async for part in content.stream(start, content.size if stop is None else stop)])

    return asyncio.run(read())


@pytest.mark.parametrize("size", [0, LARGE])
def test_a_file_is_stored_and_read_again(files, bucket, database, queue, shop, tmp_path, size) -> None:
    content, path, claim = os.urandom(size), tmp_path / "file", shop.running_job()
    path.write_bytes(content)
    sha256, stored = files.put(path, claim=claim)
    finish(queue, claim, (sha256, stored))
    assert (sha256, stored) == (hashlib.sha256(content).hexdigest(), size)
    assert rows(database) == dict.fromkeys(names(bucket), sha256)
    kept = ObjectFiles(bucket.url, database).open(sha256)
    asyncio.run(kept.check(size))
    assert (kept.size, all_of(kept), kept.head(3), files.read(sha256)) == (size, content, content[:3], content)
    if size == LARGE:
        assert all_of(kept, 7, LARGE - 9) == content[7:-9]


def test_a_content_that_is_not_there(files: ObjectFiles) -> None:
    for name in ("ab" * 32, "../../etc/passwd", ""):
        with pytest.raises(NotFound):
            files.open(name)


@ON_SQLITE
def test_one_that_is_stopped_leaves_the_file_and_no_content(files, bucket, tmp_path, shop, database) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LARGE))

    sizes: list[int] = []

    def check(size: int) -> None:
        sizes.append(size)
        if sizes.count(LARGE) == 2:  # at the last chunk: the first is its whole size, before it is read
            raise InterruptedError

    with pytest.raises(InterruptedError):
        files.put(path, check, shop.running_job())
    assert (path.stat().st_size, bucket.names()) == (LARGE, set())
    assert "<Upload>" not in bucket.request("GET", "?uploads")
    assert set(rows(database).values()) == {None}


@ON_SQLITE
@pytest.mark.parametrize("what", ["another content", "another size", "nothing"])
def test_what_the_store_has_changed_is_an_error(files, bucket, trace, shop, queue, what) -> None:
    claim = shop.running_job()
    sha256, size = files.put(trace, claim=claim)
    finish(queue, claim, (sha256, size))
    [name] = bucket.names()
    content = files.open(sha256)
    if what == "nothing":
        bucket.request("DELETE", name)
        with pytest.raises(NotFound):
            asyncio.run(content.check(content.size))
        return
    bucket.request("PUT", name, b"other" if what == "another content" else b"tra")
    if what == "another size":
        with pytest.raises(Damaged, match="3 bytes"):
            asyncio.run(content.check(content.size))
    with pytest.raises(Damaged):
        files.read(sha256)
    with pytest.raises(Damaged):
        all_of(content)


class TestLostAnswers:
    def store(self, files: ObjectFiles, bucket: Bucket, trace: Path, claim: Claim, lost: int) -> tuple[str, int]:
        """Take the file although so many answers to its upload are lost, as a worker does."""
        bucket.network.lost_answers = lost
        while True:
            try:
                return files.put(trace, claim=claim)
            except StoreUnreachable:
                assert trace.exists()

    @pytest.mark.parametrize("lost", [1, 4])
    def test_a_lost_answer_costs_nothing(self, files, bucket, trace, shop, queue, database, lost) -> None:
        claim = shop.running_job()
        finish(queue, claim, self.store(files, bucket, trace, claim, lost))
        assert len(bucket.names()) == (1 if lost == 1 else 2), "the repetition of the whole has a name of its own"
        files.remove_unreferenced(database, 0)
        [(name, sha256)] = rows(database).items()
        assert names(bucket) == {name}
        assert files.read(str(sha256)) == b"trace"

    def test_control_of_the_row_before_the_upload(self, files, bucket, trace, shop, queue, database) -> None:
        claim = shop.running_job()
        finish(queue, claim, self.store(files, bucket, trace, claim, 4))
        unknown = next(name for name, sha256 in rows(database).items() if sha256 is None)
        with database.write() as connection:
            connection.execute(tables.stored_object.delete().where(tables.stored_object.c.name == unknown))
        files._list_after = float("inf")
        files.remove_unreferenced(database, 0)
        assert names(bucket) - set(rows(database)) == {unknown}, "nobody knows of it"


class TestCutNetwork:
    def test_an_upload_that_breaks_off_is_repeated(self, files, bucket, tmp_path, shop, queue, database) -> None:
        content, path, claim = os.urandom(LARGE), tmp_path / "file", shop.running_job()
        path.write_bytes(content)
        bucket.network.cut_after = 5.5 * (1 << 20)
        with pytest.raises(StoreUnreachable):
            files.put(path, claim=claim)
        assert (path.exists(), bucket.names()) == (True, set())
        bucket.network.mend()
        stored = files.put(path, claim=claim)
        finish(queue, claim, stored)
        files.remove_unreferenced(database, 0)
        assert set(rows(database)) == names(bucket)
        assert files.read(stored[0]) == content

    @pytest.mark.parametrize("by", ["the next removal", "the server's upkeep"])
    def test_a_removal_is_completed_later(self, files, bucket, trace, shop, queue, database, clock, by) -> None:
        claim = shop.running_job()
        stored = files.put(trace, claim=claim)
        finish(queue, claim, stored)
        contents = delete_job(database, claim.job_id)
        bucket.network.cut()
        assert files.remove(contents, database) == []
        with pytest.raises(NotFound):
            files.open(stored[0])
        assert (len(rows(database)), len(bucket.names())) == (1, 1), "the row is there as long as the object"
        bucket.network.mend()
        assert files.remove(contents, database) == [], "a store that hangs is not asked for each of many jobs"
        if by == "the next removal":
            clock.sleep(PAUSE_S)
            assert files.remove(contents, database) == [stored[0]]
        else:
            assert files.remove_unreferenced(database, 3600) == [stored[0]]
        assert (rows(database), bucket.names()) == ({}, set())

    @ON_SQLITE
    def test_it_is_said_without_credentials(self, files: ObjectFiles, bucket: Bucket, database: Database) -> None:
        files.probe()
        bucket.network.cut()
        with pytest.raises(StoreUnreachable) as unreachable:
            files.probe()
        nowhere = ObjectFiles("s3://no-such-bucket", database)
        bucket.network.mend()
        with pytest.raises(StoreUnreachable, match="NoSuchBucket") as missing:
            nowhere.probe()
        for error in (unreachable.value, missing.value):
            assert "127.0.0.1" in error.detail
            assert SECRET not in error.detail
            assert error.__cause__ is None
            assert "\n" not in error.detail
        asked = "PUT http://169.254.169.254/latest/api/token"
        assert objects._words(OSError(asked)) == f"{asked}; no credentials are set, such as AWS_ACCESS_KEY_ID"


class TestRemoval:
    """Removal against uploads of the same content."""

    def race(self, files: ObjectFiles, trace: Path, queue: Queue, shop: Any, database: Database, *, late: bool) -> str:
        """Store a content again while the object that has it is deleted, or before the delete arrives; its SHA-256."""
        first = shop.running_job()
        sha256, size = files.put(trace, claim=first)
        finish(queue, first, (sha256, size))
        contents = delete_job(database, first.job_id)
        delayed: list[list[str]] = []
        really_delete = files._delete

        def again() -> None:
            trace.write_bytes(b"trace")
            claim = shop.running_job()
            finish(queue, claim, files.put(trace, claim=claim))

        def delete(gone: list[str]) -> None:
            delayed.append(gone)
            if not late:
                again()
                really_delete(gone)

        files._delete = delete  # type: ignore[method-assign]
        assert files.remove(contents, database) == [sha256]
        if late:
            again()
            really_delete(delayed[0])
        return sha256

    @pytest.mark.parametrize("late", [False, True])
    def test_an_upload_meets_a_removal(self, files, bucket, trace, queue, shop, database, late) -> None:
        sha256 = self.race(files, trace, queue, shop, database, late=late)
        assert files.read(sha256) == b"trace"
        assert rows(database) == dict.fromkeys(names(bucket), sha256)

    def test_control_of_the_names(self, files, trace, queue, shop, database, monkeypatch) -> None:
        monkeypatch.setattr(objects.secrets, "token_hex", lambda _: "the same for this content")
        sha256 = self.race(files, trace, queue, shop, database, late=True)
        with pytest.raises(NotFound):
            files.read(sha256)

    def test_a_removed_file_that_comes_back_goes_again(self, files, bucket, trace, database, clock) -> None:
        files.remove_unreferenced(database, 0)
        files.put_bytes(b"trace")
        [name] = bucket.names()
        files.remove_unreferenced(database, -60)
        assert (rows(database), bucket.names()) == ({}, set())
        bucket.request("PUT", name, b"trace")  # a repeated request that was delayed
        files.remove_unreferenced(database, -60)
        assert bucket.names() == {name}, "the control: without a look at the objects it stays"
        clock.sleep(LIST_EVERY_S)
        files.remove_unreferenced(database, 3600)
        assert bucket.names() == {name}, "it may be young"
        clock.sleep(LIST_EVERY_S)
        files.remove_unreferenced(database, -60)
        assert bucket.names() == set()

    def test_a_running_attempt_holds_what_it_has_stored(self, files, bucket, trace, queue, shop, database) -> None:
        claim = shop.running_job()
        sha256, _ = files.put(trace, claim=claim)
        other = ObjectFiles(bucket.url, database)
        assert other.remove([sha256], database) == other.remove_unreferenced(database, -60) == []
        queue.recover(queue.running()[0])
        assert other.remove_unreferenced(database, 3600) == [sha256]
        assert (rows(database), bucket.names()) == ({}, set())
        with pytest.raises(LeaseLost):
            finish(queue, claim, (sha256, 5))

    def test_many_go_in_batches(self, files, bucket, trace, queue, shop, database, monkeypatch) -> None:
        monkeypatch.setattr(objects, "BATCH", 3)
        kept, lost = shop.running_job(), shop.running_job()
        stored = []
        for number in range(7):
            trace.write_text(str(number))
            stored.append(files.put(trace, claim=lost if number else kept))
        finish(queue, kept, stored[0])
        queue.recover(queue.running()[0])
        assert set(files.remove_unreferenced(database, 3600)) == {sha256 for sha256, _ in stored[1:]}
        assert rows(database) == dict.fromkeys(names(bucket), stored[0][0])


class TestLease:
    def test_who_has_lost_it_uploads_nothing(self, files, bucket, trace, queue, shop, database) -> None:
        claim = shop.running_job()
        queue.recover(queue.running()[0])
        with pytest.raises(LeaseLost):
            files.put(trace, claim=claim)
        assert (trace.exists(), rows(database), bucket.names()) == (True, {}, set())

    def test_who_loses_it_amid_an_upload_leaves_nothing(self, files, bucket, trace, queue, shop, database) -> None:
        claim, lose = shop.running_job(), iter([lambda: queue.recover(queue.running()[0])])

        def lost(line: bytes) -> None:
            if line.startswith(b"PUT "):
                next(lose, int)()

        bucket.network.on_request = lost
        with pytest.raises(LeaseLost):
            files.put(trace, claim=claim)
        files.remove_unreferenced(database, 3600)
        assert (rows(database), bucket.names()) == ({}, set())


class TestUploadedCode:
    def test_it_is_stored_once_and_repaired(self, files: ObjectFiles, bucket: Bucket, database: Database) -> None:
        uploads = Uploads(database, files)
        file, is_new = uploads.put(b"code")
        assert (is_new, uploads.put(b"code")[1], len(bucket.names())) == (True, False, 1)
        files.remove_unreferenced(database, -60)
        [name] = bucket.names()
        bucket.request("PUT", name, b"edoc")
        with pytest.raises(Damaged, match=f"PUT /files/{file['sha256']}"):
            uploads.read(file["sha256"])
        uploads.put(b"code")
        assert uploads.read(file["sha256"]) == b"code"

    def test_a_young_one_without_a_row_of_its_own_stays_a_while(self, files, bucket, database) -> None:
        sha256, _ = files.put_bytes(b"code")
        assert files.remove_unreferenced(database, 3600) == []
        assert files.remove_unreferenced(database, -60) == [sha256]

    def test_no_row_refers_to_one_that_was_removed_meanwhile(self, files: ObjectFiles, database: Database) -> None:
        class Removing(ObjectFiles):
            def check_kept(self, connection: Any, sha256: str) -> None:
                connection.execute(update(tables.stored_object).values(removing=True))
                super().check_kept(connection, sha256)

        files.__class__ = Removing
        with pytest.raises(StorageFailed, match="upload it again"):
            Uploads(database, files).put(b"code")
        with database.read() as connection:
            assert connection.execute(select(tables.code_file)).all() == []


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{put_database(tmp_path / 'other')}")
    yield opened
    opened.close()


def test_two_databases_with_one_url_leave_each_others_files_alone(files, bucket, database, another) -> None:
    sha256, _ = files.put_bytes(b"code")
    others = ObjectFiles(bucket.url, another)
    others.remove_unreferenced(another, -60)
    assert files.read(sha256) == b"code"
    # The control: with the same id, and as the owner, the other one does not.
    with database.read() as connection:
        own = connection.execute(select(tables.setting.c.value).where(tables.setting.c.name == "objects_id")).scalar()
    with another.write() as connection:
        connection.execute(update(tables.setting).where(tables.setting.c.name == "objects_id").values(value=own))
    others = ObjectFiles(bucket.url, another)
    others.remove_unreferenced(another, -60)
    assert files.read(sha256) == b"code"
    others.claim(another)
    ObjectFiles(bucket.url, another).remove_unreferenced(another, -60)
    with pytest.raises(NotFound):
        files.read(sha256)


def test_a_folders_files_are_copied(files, bucket, trace, queue, shop, database, tmp_path) -> None:
    folder = ArtifactFiles(tmp_path / "artifacts")
    stored = [folder.put_bytes(content) for content in (b"whole", b"damaged", b"gone", b"unreadable", b"nobody's")]
    folder.open_path(stored[1][0]).write_bytes(b"degamad")
    folder.open_path(stored[2][0]).unlink()
    unreadable = folder.open_path(stored[3][0])
    unreadable.unlink()
    unreadable.symlink_to(trace)
    trace.write_bytes(b"elsewhere")
    finish(queue, shop.running_job(), *stored[:4])
    code, _ = Uploads(database, folder).put(b"code")
    assert copy_files(folder, files, database) == Copied(copied=2, present=0, lost=3)
    assert copy_files(folder, files, database) == Copied(copied=0, present=2, lost=3)
    files.remove_unreferenced(database, -60)
    assert set(rows(database).values()) == {stored[0][0], code["sha256"]}
    assert (files.read(stored[0][0]), files.read(code["sha256"])) == (b"whole", b"code")
    assert folder.read(stored[0][0]) == b"whole"


def test_obstore_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "app.store.files.objects")
    with pytest.raises(CannotRunHere, match=r"install flopwatch\[objects\]"):
        import app.store.files.objects  # noqa: F401


@ON_SQLITE
def test_a_store_without_its_options_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(CannotRunHere, match=r"Account must be specified.*AZURE_"):
        ObjectFiles("az://container/prefix", database)
