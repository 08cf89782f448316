"""Data is its owner's alone, whatever the umask is and whoever made the folder."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import CannotRunHere
from app.settings import Settings
from app.store.database.engine import Database, open_database, open_existing
from app.store.database.moved import NOTE
from app.store.files.artifacts import ArtifactFiles
from app.store.files.opening import open_files


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


def use(folder: Path) -> None:
    """Make or open the data in the folder, and store something."""
    settings = Settings(data_dir=folder)
    database = open_database(settings)
    with database.write() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 1")
    ArtifactFiles(settings.artifacts_dir).put_bytes(b"content")
    database.backup(folder / "backup")
    assert {path.name for path in folder.iterdir()} >= {"flopwatch.sqlite3-wal", "artifacts.lock"}
    check(folder)
    database.close()


def check(folder: Path) -> None:
    """Raise AssertionError for anything that others may use."""
    open_to_others = {
        str(path): oct(path.stat().st_mode) for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077
    }
    assert open_to_others == {}


def test_what_is_made_is_private(tmp_path: Path) -> None:
    use(tmp_path / "new" / "data")
    check(tmp_path / "new")


def test_wider_permissions_are_corrected(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    use(folder)
    (folder / "backup").unlink()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with pytest.raises(AssertionError):
        check(folder)
    open_database(Settings(data_dir=folder)).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_database_elsewhere_is_mended(tmp_path: Path) -> None:
    shared, data = tmp_path / "shared", tmp_path / "data"
    shared.mkdir(mode=0o755)
    path = shared / "jobs.sqlite3"
    settings = Settings(data_dir=data, database_url=f"sqlite:///{path}")
    first = open_database(settings)
    with first.write() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 1")
    files = sorted(shared.iterdir())
    assert [file.name for file in files] == [f"jobs.sqlite3{suffix}" for suffix in ("", "-shm", "-wal", ".lock")]
    (shared / "homework").touch()
    for file in files:
        file.chmod(0o644)
    open_database(settings).close()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((shared / "homework").stat().st_mode) == 0o666
    first.close()


def test_a_folder_of_others_files_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / "homework").touch()
    open_database(Settings(data_dir=folder)).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    for name in ("flopwatch.sqlite3", "flopwatch.sqlite3.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o775, 0o1777])
def test_a_folder_that_others_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o775:
        (folder / "homework").touch()
    with pytest.raises(CannotRunHere, match=r"Others may write to .*data.*FLOPWATCH_DATA_DIR"):
        open_database(Settings(data_dir=folder))
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert not (folder / "flopwatch.sqlite3").exists()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(CannotRunHere, match="FLOPWATCH_DATA_DIR"):
            open_database(Settings(data_dir=path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user's")
def test_another_users_database_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    open_database(settings).close()
    before = {path: path.stat() for path in settings.data_dir.iterdir()}
    os.chown(settings.data_dir, 64_999, 64_999)
    with pytest.raises(CannotRunHere, match=r"belongs to the user 64999, .* runs as 0"):
        open_existing(settings)
    assert {path: path.stat() for path in settings.data_dir.iterdir()} == before


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "flopwatch.sqlite3.lock").symlink_to(tmp_path / "elsewhere")
    settings = Settings(data_dir=folder)
    with pytest.raises(CannotRunHere, match="is a symbolic link"):
        open_database(settings)
    # One that is put there later is not followed either.
    with pytest.raises(OSError, match="symbolic links"), Database(settings.resolved_database_url).write():
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_of_artifacts_elsewhere_is_private(tmp_path: Path, mode: int) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(mode)
    settings = Settings(data_dir=tmp_path / "data", artifacts_url=str(elsewhere))
    database = open_database(settings)
    open_files(settings, database).put_bytes(b"content")
    database.close()
    check(elsewhere)
    check(settings.data_dir)
    files = [path.name for path in (settings.data_dir / "artifacts").rglob("*") if path.is_file()]
    assert files == [NOTE], "no file of a job"


def test_a_shared_folder_of_artifacts_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "of-others").touch()
    shared.chmod(0o777)
    settings = Settings(data_dir=tmp_path / "data", artifacts_url=str(shared))
    database = open_database(settings)
    with pytest.raises(CannotRunHere, match="set FLOPWATCH_ARTIFACTS_URL to a folder of its own"):
        open_files(settings, database)
    database.close()


def test_locks_that_cannot_be_made_beside_the_artifacts_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mount.lock").mkdir()
    settings = Settings(data_dir=tmp_path / "data", artifacts_url=str(tmp_path / "mount"))
    database = open_database(settings)
    with pytest.raises(CannotRunHere, match=r"mount.lock, .* Name a folder inside of it, .*mount/artifacts"):
        open_files(settings, database)
    database.close()
