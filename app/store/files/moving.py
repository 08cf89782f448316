"""Copies the files of a folder to an object store, for `flopwatch move`."""

from dataclasses import dataclass

from sqlalchemy import select

from app.errors import NotFound
from app.store import tables
from app.store.database.engine import Database
from app.store.files.artifacts import ArtifactFiles
from app.store.files.objects import ObjectFiles


@dataclass(frozen=True)
class Copied:
    """The numbers of files: `lost` ones are not in the folder, or damaged or unreadable there."""

    copied: int
    present: int
    lost: int


def copy_files(folder: ArtifactFiles, store: ObjectFiles, database: Database) -> Copied:
    """Copy each file that a row refers to and the store does not have; the folder stays as it is.

    Others may use the database meanwhile. A repeated call copies only what has come since. Raises StoreUnreachable.
    """
    wanted: set[str] = set()
    with database.read() as connection:
        for column in (tables.artifact.c.sha256, tables.code_file.c.sha256):
            wanted.update(connection.execute(select(column).distinct()).scalars())
    copied = present = lost = 0
    for sha256 in sorted(wanted):
        try:
            store.open(sha256)
        except NotFound:
            pass
        else:
            present += 1
            continue
        try:  # nothing refers to a damaged file that is stored now, so it is removed
            is_whole = store.put(folder.open_path(sha256))[0] == sha256
        except (NotFound, OSError):
            is_whole = False
        copied, lost = copied + is_whole, lost + (not is_whole)
    return Copied(copied, present, lost)
