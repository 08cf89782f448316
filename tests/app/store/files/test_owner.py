"""Files of one database that another one knows nothing of."""

import errno
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.errors import CannotRunHere, NotFound
from app.settings import Settings
from app.store.database.engine import Database, open_database
from app.store.database.slices import Slices
from app.store.files import owner
from app.store.files.artifacts import ArtifactFiles
from app.store.files.opening import open_files
from app.store.keeping.deleting import delete_job, remove_files
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.records import Finish, StoredArtifact
from tests.app.store.conftest import Shop
from tests.databases import put_database


class World:
    """A database with files, and another one that was made from it, or beside it."""

    def __init__(self, folder: Path, files_url: str | None) -> None:
        self.settings = Settings(data_dir=folder / "living", artifacts_url=files_url)
        put_database(self.settings.data_dir)
        self.database = open_database(self.settings)
        self.files: Any = open_files(self.settings, self.database)

    def store(self, content: bytes) -> tuple[int, str]:
        """Finish a job with one file; its id, and the file's SHA-256."""
        shop = Shop(Queue(self.database), Registration(self.database))
        claim = shop.running_job()
        sha256, size = self.files.put_bytes(content)
        file = StoredArtifact(0, "t", "trace", "text/plain", size, sha256)
        shop.queue.finish(claim, Finish("succeeded", artifacts=[file]))
        self.files.release([sha256])
        return claim.job_id, sha256

    def copied_to(self, folder: Path, *, whole: bool) -> Settings:
        """Copy the database, or the whole data folder, to another folder, which has the same store of files."""
        if whole:
            shutil.copytree(self.settings.data_dir, folder)
        else:
            folder.mkdir(mode=0o700)
            self.database.backup(folder / "flopwatch.sqlite3")
        return self.settings.model_copy(update={"data_dir": folder})


@pytest.fixture(params=["folder", "objects"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A store of files that several data folders can name."""
    is_folder = request.param == "folder"
    url = str(tmp_path / "shared" / "files") if is_folder else request.getfixturevalue("bucket").url
    world = World(tmp_path, url)
    yield world
    world.database.close()


def unaware(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open the files in a process that the refusal at the start has missed, as of one that runs already."""
    with monkeypatch.context() as patch:
        patch.setattr(owner.OwnedFiles, "refuse_foreign", lambda *_, **_options: None)
        return open_files(settings, database)


def upkeep(files: Any, database: Database, _job: int) -> None:
    files.remove_unreferenced(database, -60)


def deletion(files: Any, database: Database, job: int) -> None:
    remove_files(Slices(database), files, delete_job(database, job))


@pytest.mark.parametrize("whole", [False, True], ids=["restored backup", "cloned folder"])
@pytest.mark.parametrize("remove", [upkeep, deletion])
def test_a_copy_of_the_database_removes_no_file(world, tmp_path, remove, whole, monkeypatch, caplog) -> None:
    job, before = world.store(b"known to both")
    copy = world.copied_to(tmp_path / "copy", whole=whole)
    _, later = world.store(b"known to the living one")
    with closing(open_database(copy)) as database:
        with pytest.raises(CannotRunHere, match=r"belongs to the database .*living.*prune --claim-files"):
            open_files(copy, database)
        files = unaware(copy, database, monkeypatch)
        with caplog.at_level(logging.WARNING):
            remove(files, database, job)
        assert [world.files.read(one) for one in (before, later)] == [b"known to both", b"known to the living one"]
        if remove is not upkeep or isinstance(files, ArtifactFiles):
            assert "no file is removed" in caplog.text
        # The control: as the owner, it removes what it does not know, and the living one removes nothing more.
        Shop(Queue(database), Registration(database)).submit()
        files = open_files(copy, database, claim=True)
        upkeep(files, database, job)
        with pytest.raises(NotFound):
            files.open(later)
    _, last = world.store(b"last")
    upkeep(world.files, world.database, job)
    assert world.files.read(last) == b"last"


def test_two_databases_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, str(tmp_path / "shared" / "files"))
    _, sha256 = world.store(b"its own")
    other = world.settings.model_copy(update={"data_dir": tmp_path / "other"})
    put_database(other.data_dir)
    with closing(world.database), closing(open_database(other)) as database:
        with pytest.raises(CannotRunHere, match="belongs to the database"):
            open_files(other, database)
        upkeep(unaware(other, database, monkeypatch), database, 0)
        with pytest.raises(CannotRunHere, match="has no job, and would remove every file"):
            open_files(other, database, claim=True)
        assert world.files.read(sha256) == b"its own"


def test_a_folder_that_moves_as_a_whole_keeps_its_files(tmp_path: Path) -> None:
    world = World(tmp_path, None)
    _, sha256 = world.store(b"its own")
    world.database.close()
    moved = world.settings.model_copy(update={"data_dir": tmp_path / "elsewhere"})
    shutil.copytree(world.settings.data_dir, moved.data_dir)
    with closing(open_database(moved)) as database:
        files = open_files(moved, database)
        stray, _ = files.put_bytes(b"stray")
        files.release([stray])
        assert files.remove_unreferenced(database, -60) == [stray]
        assert files.read(sha256) == b"its own"


def test_a_backup_restored_beside_the_living_database_removes_no_file(tmp_path: Path) -> None:
    world = World(tmp_path, None)
    restored = world.settings.data_dir / "restored.sqlite3"
    world.database.backup(restored)
    _, sha256 = world.store(b"later")
    copy = world.settings.model_copy(update={"database_url": f"sqlite:///{restored}"})
    with closing(world.database), closing(open_database(copy)) as database:
        with pytest.raises(CannotRunHere, match=r"belongs to the database .*flopwatch\.sqlite3"):
            open_files(copy, database)
        upkeep(world.files, database, 0)
        assert world.files.read(sha256) == b"later"


def test_a_cloned_folder_whose_files_are_linked_removes_none(tmp_path: Path) -> None:
    living, clone = tmp_path / "living", tmp_path / "clone"
    (tmp_path / "disk").mkdir()
    living.mkdir(mode=0o700)
    (living / "artifacts").symlink_to(tmp_path / "disk")
    world = World(tmp_path, None)
    shutil.copytree(living, clone, symlinks=True)
    _, sha256 = world.store(b"later")
    copy = Settings(data_dir=clone)
    with closing(world.database), closing(open_database(copy)) as database:
        with pytest.raises(CannotRunHere, match=r"belongs to the database .*living"):
            open_files(copy, database)
        upkeep(ArtifactFiles(copy.artifacts_dir), database, 0)
        assert world.files.read(sha256) == b"later"
        linked = tmp_path / "linked"
        linked.symlink_to(living)
        open_files(Settings(data_dir=linked), world.database)  # another name of the owner


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_note_that_the_disk_refuses_stops_removals_only(tmp_path, monkeypatch, caplog, where) -> None:
    world = World(tmp_path, None)
    _, sha256 = world.store(b"its own")
    forget_note(world)
    if where == "read":
        (world.settings.artifacts_dir / owner.NOTE).mkdir()
    else:
        monkeypatch.setattr(ArtifactFiles, "write_note", full)
    with closing(world.database) as database, caplog.at_level(logging.WARNING):
        files: Any = open_files(world.settings, database)
        stray, _ = files.put_bytes(b"stray")
        files.release([stray])
        upkeep(files, database, 0)
        upkeep(files, database, 0)
        assert (files.read(sha256), files.read(stray)) == (b"its own", b"stray")
    said = [record.message for record in caplog.records if "no file is removed" in record.message]
    assert len(said) == len(set(said)) > 0, said


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_without_an_owner_stay_where_some_are_unknown(world, tmp_path, caplog) -> None:
    """As after an upgrade, or with a database from before the files."""
    _, sha256 = world.store(b"its own")
    caplog.set_level(logging.WARNING)
    with ExitStack() as stack:
        new = stack.enter_context(closing(open_database(world.copied_to(tmp_path / "copy", whole=False))))
        _, later = world.store(b"later")
        forget_note(world)
        copy = world.settings.model_copy(update={"data_dir": tmp_path / "copy"})
        files: Any = open_files(copy, new)
        upkeep(files, new, 0)
        assert caplog.text.count("prune --claim-files") == 1, "at the start, and not again"
        assert (world.files.read(sha256), world.files.read(later)) == (b"its own", b"later")
        open_files(world.settings, world.database)  # knows all of them, and becomes the owner
        with pytest.raises(CannotRunHere, match="belongs to the database"):
            open_files(copy, new)


def test_a_damaged_note_is_no_owner(world: World) -> None:
    _, sha256 = world.store(b"its own")
    world.files.write_note(b"{")
    with pytest.raises(CannotRunHere, match="cannot be read"):
        open_files(world.settings, world.database)
    upkeep(world.files, world.database, 0)
    assert world.files.read(sha256) == b"its own"


def test_a_database_that_moved_to_a_server_leaves_its_files_alone(tmp_path, postgres, monkeypatch) -> None:
    """The mark of the move refuses it (tests/app/cli/test_move.py); so does the note, where a process has missed it."""
    world = World(tmp_path, None)
    with postgres.database() as url, closing(world.database):
        there = world.settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})
        with closing(open_database(there)) as server:
            files: Any = open_files(there, server, claim=True)
            sha256, _ = files.put_bytes(b"the server's")
            files.release([sha256])
            upkeep(unaware(world.settings, world.database, monkeypatch), world.database, 0)
            assert files.read(sha256) == b"the server's"
            upkeep(files, server, 0)
            with pytest.raises(NotFound):
                files.read(sha256)


def forget_note(world: World) -> None:
    if isinstance(world.files, ArtifactFiles):
        (Path(str(world.files)) / owner.NOTE).unlink()
    else:
        world.files._delete([owner.NOTE])


@pytest.mark.parametrize("first", ["folder", "objects"])
def test_a_database_has_its_files_in_one_store(tmp_path, first, request, monkeypatch) -> None:
    """A server with another folder would find no file of the jobs, and keep its own where no other looks."""
    url = f"sqlite:///{tmp_path / 'one.sqlite3'}"
    places: dict[str, Any] = {"folder": {}, "objects": {"artifacts_url": request.getfixturevalue("bucket").url}}
    at_home = Settings(data_dir=tmp_path / "home", database_url=url, **places[first])
    others = [
        Settings(data_dir=tmp_path / "other", database_url=url),
        Settings(data_dir=tmp_path / "home", database_url=url, artifacts_url=str(tmp_path / "files")),
    ]
    if first == "folder":
        others.append(Settings(data_dir=tmp_path / "home", database_url=url, **places["objects"]))
    with closing(open_database(at_home)) as database:
        Shop(Queue(database), Registration(database)).submit()
        open_files(at_home, database)
        for settings in others:
            with pytest.raises(CannotRunHere, match=r"files of the database .*one.sqlite3 are in .*, and not in "):
                open_files(settings, database)
        open_files(at_home, database)
        older = ArtifactFiles(others[1].artifacts_dir)  # whose note an older release has written
        older.write_note(json.dumps(asdict(older.owner_for(database))).encode())
        with pytest.raises(CannotRunHere, match="and not in"):
            open_files(others[1], database)
        open_files(others[1], database, claim=True)  # as prune --claim-files does
        open_files(others[1], database)
        with pytest.raises(CannotRunHere, match="and not in"):
            open_files(at_home, database)
        monkeypatch.setattr(owner, "_store_of", lambda _connection: None)
        open_files(others[0], database)  # control: without the store's id
