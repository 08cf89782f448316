import os
import re
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from app.errors import CannotRunHere, DatabaseBusy, NetworkFileSystem, StorageFailed
from app.settings import Settings
from app.store.database import file_systems, sqlite
from app.store.database.engine import Database, open_database


def count(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(text("SELECT count(*) FROM worker")).scalar_one())


def add(connection: Connection, name: str) -> None:
    connection.execute(
        text(
            "INSERT INTO worker (id, hostname, pid, state, kinds, capabilities, devices, versions, beat,"
            " registered_at, last_seen_at) VALUES (:id, 'h', 1, 'active', '[]', '[]', '[]', '{}', 0, '2020', '2020')"
        ),
        {"id": name},
    )


def test_connections_are_set_up_as_the_measurements_asked(database: Database) -> None:
    with database.read() as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
        version = connection.exec_driver_sql("SELECT sqlite_version()").scalar_one()
    assert pragma == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    assert tuple(map(int, version.split("."))) >= sqlite.SAFE_VERSION


def test_an_old_pysqlite3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pysqlite3.dbapi2.sqlite_version_info", (3, 51, 2))
    sqlite.driver.cache_clear()
    try:
        with pytest.raises(CannotRunHere, match=r"at least 3\.51\.3"):
            sqlite.driver()
    finally:
        sqlite.driver.cache_clear()


def test_a_read_is_one_snapshot(database: Database) -> None:
    with database.read() as snapshot:
        before = snapshot.execute(text("SELECT count(*) FROM worker")).scalar_one()
        with database.write() as connection:
            add(connection, "one")
        assert snapshot.execute(text("SELECT count(*) FROM worker")).scalar_one() == before == 0
    assert count(database) == 1


def test_a_database_locked_by_others_is_busy_and_reads_go_on(settings: Settings) -> None:
    database = Database(settings.resolved_database_url, busy_timeout_s=0.2)
    # Somebody who knows nothing of the write lock, such as the sqlite3 shell.
    stranger = sqlite.driver().connect(str(settings.data_dir / "flopwatch.sqlite3"), isolation_level=None)
    stranger.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(DatabaseBusy) as caught, database.write():
        pass
    assert 0.1 < time.monotonic() - started < 5
    assert caught.value.status == 503
    assert "Retry-After" in caught.value.headers
    assert count(database) == 0
    stranger.execute("ROLLBACK")
    with database.write() as connection:
        add(connection, "one")
    stranger.close()
    database.close()


@pytest.mark.parametrize("page", [0, 1], ids=["no database", "a malformed table"])
def test_a_damaged_file_is_a_fault_of_the_disk(settings: Settings, page: int) -> None:
    database = open_database(settings)
    path = database.backend.path  # type: ignore[attr-defined]
    with database.read() as connection:
        size = int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
    database.close()
    with path.open("r+b") as file:
        file.seek(page * size)
        file.write(b"x" * size * (1 if page == 0 else path.stat().st_size // size - page))
    with pytest.raises(StorageFailed, match=f"{re.escape(str(path))} is damaged"):
        count(open_database(settings))


def test_a_watch_sees_commits_of_each_connection(database, settings) -> None:
    watch = database.watch()
    assert watch.changed()
    assert not watch.changed()
    with database.write() as connection:
        add(connection, "one")
    assert watch.changed()
    assert not watch.changed()
    with closing(Database(settings.resolved_database_url)) as another, another.write() as connection:
        add(connection, "two")
    assert watch.changed()
    assert not watch.changed()


def test_a_watch_that_cannot_look_says_changed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = database.watch()
    watch.changed()

    def broken(_counter: sqlite.DataVersion) -> int:
        raise sqlite.driver().OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(sqlite.DataVersion, "value", broken)
        assert watch.changed()
    assert not watch.changed()


def test_a_backup_is_consistent_while_others_write(database: Database, tmp_path: Path) -> None:
    stop = threading.Event()

    def write_pairs() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with database.write() as connection:
                add(connection, f"left {number}")
                add(connection, f"right {number}")

    thread = threading.Thread(target=write_pairs)
    thread.start()
    try:
        for number in range(5):
            database.backup(tmp_path / f"copy{number}.sqlite3")
    finally:
        stop.set()
        thread.join()
    for number in range(5):
        copy = Database(f"sqlite:///{tmp_path}/copy{number}.sqlite3")
        assert count(copy) % 2 == 0
        copy.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_connections_do_not_cross_a_fork(database: Database) -> None:
    assert count(database) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: count(database), lambda: Database(database.url)):
            try:
                use()
            except CannotRunHere:
                refused += 1
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with database.write() as connection:
        add(connection, "one")
    assert count(database) == 1


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "no url at all"])
def test_unusable_urls_are_refused(url: str) -> None:
    with pytest.raises(CannotRunHere):
        Database(url)


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(CannotRunHere) as caught:
        Database("mysql://user:secret@host/db")
    assert "secret" not in str(caught.value)


class TestFileSystems:
    TABLE = (
        "/dev/vda / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "/dev/vdb /home/local xfs rw 0 0\n"
        "share /mnt/with\\040blank cifs rw 0 0\n"
        "tmpfs /mnt/over tmpfs rw 0 0\n"
        "host:/x /mnt/over fuse.sshfs rw 0 0\n"
    )

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/var/lib/db", "ext4"),
            ("/home/me/db", "nfs4"),
            ("/home/local/db", "xfs"),
            ("/homestead/db", "ext4"),
            ("/mnt/with blank/db", "cifs"),
            ("/mnt/over/db", "fuse.sshfs"),
        ],
    )
    def test_the_longest_mount_counts(self, tmp_path: Path, path: str, kind: str) -> None:
        table = tmp_path / "mounts"
        table.write_text(self.TABLE)
        assert file_systems.file_system_type(Path(path), table) == kind

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        table, link = tmp_path / "mounts", tmp_path / "link"
        table.write_text(self.TABLE)
        link.symlink_to("/home/me")
        assert file_systems.file_system_type(link / "db", table) == "nfs4"

    def test_no_mount_table_no_opinion(self, tmp_path: Path) -> None:
        assert file_systems.file_system_type(tmp_path, tmp_path / "none") is None

    @pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
    def test_a_database_on_a_network_file_system_is_refused(self, tmp_path, kind, monkeypatch) -> None:
        table = tmp_path / "mounts"
        table.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
        monkeypatch.setattr(file_systems.refuse_network_file_system, "__defaults__", (table,))
        with pytest.raises(NetworkFileSystem, match=kind.replace(".", r"\.")):
            open_database(Settings(data_dir=tmp_path / "data"))
        assert not (tmp_path / "data" / "flopwatch.sqlite3").exists()


@pytest.mark.parametrize("name", ["a?b=c d;e&f", "100%41#ü€", "file:x?mode=memory", "a:b@c"])
def test_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    data_dir = tmp_path / name
    for settings in (Settings(data_dir=data_dir), Settings(data_dir=data_dir)):
        database = open_database(settings)
        with database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS kept (n INTEGER)")
            connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
        database.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (data_dir / "flopwatch.sqlite3").is_file()
    with closing(sqlite.driver().connect(str(data_dir / "flopwatch.sqlite3"))) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (2,)
