"""Examines what server and workers keep their data in: the folder, the database, the store of files."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import func, select

from app.checkup import Finding, absent, broken, works
from app.errors import CannotRunHere, DiskFull, FlopwatchError, StoreUnreachable, is_no_space
from app.settings import Settings
from app.store.database.engine import Database, open_existing
from app.store.database.file_systems import refuse_network_file_system
from app.store.database.moved import refuse_elsewhere
from app.store.database.private import DATABASE
from app.store.files.opening import open_files
from app.store.queue.registration import server
from app.store.reading.queries import Reading

MIN_FREE_BYTES = 256 << 20
PROBE_BYTES = 1 << 20
MAKE_ROOM = "make room on that disk: `flopwatch prune`, `flopwatch delete`, or another FLOPWATCH_DATA_DIR"


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield what is found. Nothing is made or changed, but probes that are removed at once."""
    folders = [settings.data_dir]
    if settings.artifacts_url is not None and settings.object_store_url is None:
        folders.append(settings.artifacts_dir)
    for folder in folders:
        yield from _folder(folder, with_sqlite=not settings.database_url and folder == settings.data_dir)
    try:
        refuse_elsewhere(settings)
    except CannotRunHere as error:
        yield broken("database", error.detail, "set FLOPWATCH_DATABASE_URL")
        return
    if not settings.database_url and not (settings.data_dir / DATABASE).exists():
        yield absent("database", f"none yet in {settings.data_dir}: the first server or worker makes it")
        return
    try:
        with closing(open_existing(settings)) as database:
            yield _database(database)
            yield from _files(settings, database)
            yield from _workers(database)
    except FlopwatchError as error:
        yield broken("database", f"{error.title}: {error.detail}", _database_cure(error, settings))


def _folder(folder: Path, *, with_sqlite: bool) -> Iterator[Finding]:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    what = str(folder) if existing == folder else f"{folder}, not made yet, in {existing}"
    status = existing.stat()
    if existing == folder and status.st_uid != os.geteuid():
        cure = "run server and workers as the user who owns it, or set FLOPWATCH_DATA_DIR to a folder of your own"
        yield broken("permissions", f"{folder} belongs to the user {status.st_uid}, not {os.geteuid()}", cure)
        return
    if not stat.S_ISDIR(status.st_mode) or not os.access(existing, os.W_OK | os.X_OK):
        yield broken("permissions", f"{what}: nothing can be written there", "set FLOPWATCH_DATA_DIR to another folder")
        return
    yield works("permissions", f"{what}: writable")
    try:
        if with_sqlite:
            refuse_network_file_system(existing)
        with tempfile.TemporaryFile(dir=existing) as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
    except FlopwatchError as error:
        yield broken("disk", error.detail, "set FLOPWATCH_DATA_DIR to a folder on a local disk")
        return
    except OSError as error:
        cure = MAKE_ROOM if is_no_space(error) else "see the system's log (dmesg), or set another FLOPWATCH_DATA_DIR"
        yield broken("disk", f"{what}: a file of 1 MiB cannot be written: {error.strerror}", cure)
        return
    free = shutil.disk_usage(existing).free
    text = f"{what}: {free >> 20} MiB free"
    yield works("disk", text) if free >= MIN_FREE_BYTES else broken("disk", text, MAKE_ROOM)


def _database(database: Database) -> Finding:
    with database.read() as connection:
        dialect = database.backend.engine.dialect.name
        version = connection.execute(
            select(func.sqlite_version() if dialect == "sqlite" else func.version())
        ).scalar_one()
    database.probe()
    name = f"SQLite {version}" if dialect == "sqlite" else str(version).partition(" on ")[0]
    return works("database", f"{name}, {database.backend.place}: read and written")


def _files(settings: Settings, database: Database) -> Iterator[Finding]:
    where = settings.object_store_url or str(settings.artifacts_dir)
    try:
        open_files(settings, database).probe()
        yield works("files", f"{where}: a file was stored")
    except FlopwatchError as error:
        if isinstance(error, StoreUnreachable):
            cure = "check FLOPWATCH_ARTIFACTS_URL, the store's variables (AWS_…, GOOGLE_…, AZURE_…) and its server"
        else:
            cure = MAKE_ROOM if isinstance(error, DiskFull) else "see the error"
        yield broken("files", f"{where}: {error.title}: {error.detail}", cure)


def _workers(database: Database) -> Iterator[Finding]:
    """Compare all living workers with the newest server, and say which are unfit."""
    with database.read() as connection:
        known = server(connection)
    workers = [one for one in Reading(database).workers(gone=0) if one["broken"] is None]
    if known is None or not workers:
        yield absent("workers", f"{len(workers) or 'none'} connected" + ("" if known else "; no server has run yet"))
        return
    wanted, alike = known["version"], 0
    for worker in workers:
        own = worker["versions"].get("flopwatch", "unknown")
        if worker["unfit"] is not None:
            cure = f"see {worker['unfit']['code']} in docs/failures.md"
            yield broken("workers", f"{worker['id']} is unfit: {worker['unfit']['reason']}", cure)
        elif own != wanted:
            found = f"{worker['id']} is version {own}, and the server {wanted}"
            yield absent("workers", found, "update all to one version")
        else:
            alike += 1
    if alike:
        yield works("workers", f"{alike} fit, of the server's version {wanted}")


def _database_cure(error: FlopwatchError, settings: Settings) -> str:
    if isinstance(error, DiskFull):
        return MAKE_ROOM
    if not str(settings.resolved_database_url).startswith("sqlite"):
        return (
            "start PostgreSQL, and check FLOPWATCH_DATABASE_URL: host, port, user, database; "
            "the password in ~/.pgpass or PGPASSWORD; pg_hba.conf"
        )
    return "see the error; docs/operations.md has more"
