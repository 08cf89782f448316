"""Keeps databases from deleting each other's files: a store has a note that names the database of its files.

To a database, a file that none of its rows names is rubbish. To another database, which was moved, restored or copied,
it may be a result. So only the owner removes files, and only the owner's server and workers use the store. A store
without a note gets one from the first database that knows every file in it.
"""

from __future__ import annotations

import json
import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import insert, select

from app.errors import CannotRunHere
from app.store import tables
from app.store.database.engine import Database

logger = logging.getLogger(__name__)

NOTE = "owner.json"
BESIDE = "the one in the folder above"


@dataclass(frozen=True)
class Owner:
    """A database as the owner of files."""

    files_id: str
    """The id that the database gives to its files; a copy of the database has it, too."""
    database: str
    """What tells the database from its copies (Backend.identity)."""
    place: str
    """Where it is, for people."""

    @property
    def key(self) -> tuple[str, str]:
        return self.files_id, self.database


def owner_of(database: Database, folder: Path | None = None) -> Owner:
    """Return the database as an owner; `folder` is the files' folder. A SQLite database beside it moves with it, so
    that no copy of both is a second owner."""
    place = database.backend.place
    is_beside = folder is not None and Path(place).parent == folder.absolute().parent
    return Owner(id_of_files(database), BESIDE if is_beside else database.backend.identity(), place)


def id_of_files(database: Database) -> str:
    """Return the id of the database's files; it gets one when it has none."""
    name, setting = "objects_id", tables.setting.c
    query = select(setting.value).where(setting.name == name)
    with database.read() as connection:
        found = connection.execute(query).scalar_one_or_none()
    if found is None:
        with database.write() as connection:
            found = connection.execute(query).scalar_one_or_none()
            if found is None:
                found = secrets.token_hex(8)
                connection.execute(insert(tables.setting), {"name": name, "value": found})
    return str(found)


class OwnedFiles(ABC):
    """Files with a note of their owner."""

    @abstractmethod
    def owner_for(self, database: Database) -> Owner:
        """Return the database as it would be in the note."""

    @abstractmethod
    def read_note(self) -> bytes | None:
        """Return the note; None where there is none."""

    @abstractmethod
    def write_note(self, content: bytes) -> None: ...

    @abstractmethod
    def has_unknown(self, database: Database) -> bool:
        """Return True if there is a file that the database does not know."""

    def claim(self, database: Database) -> None:
        """Make the database the files' owner, whoever was."""
        self.write_note(json.dumps(asdict(self.owner_for(database)), indent=1).encode())

    def refuse_foreign(self, database: Database) -> None:
        """Raise CannotRunHere if the files belong to another database. Files that belong to none yet may be read and
        added to."""
        why, is_owned = self._refusal(database)
        if why and is_owned:
            raise CannotRunHere(why)

    def may_remove(self, database: Database) -> bool:
        """Return True if the database is the owner, or has just become it; else say why it is not."""
        why, _ = self._refusal(database)
        if why:
            logger.warning("no file is removed: %s", why)
        return not why

    def _refusal(self, database: Database) -> tuple[str, bool]:
        """Return why the database may not remove files, "" if it may; and whether there is an owner."""
        note = self.read_note()
        if note is None:
            if not self.has_unknown(database):
                self.claim(database)
                return "", True
            whose = "has files that this database does not know, and no note of their owner"
        else:
            try:
                owner = Owner(**json.loads(note))
            except (ValueError, TypeError):
                whose = f"has a note of the files' owner, {NOTE}, that cannot be read"
            else:
                if owner.key == self.owner_for(database).key:
                    return "", True
                whose = f"belongs to the database {owner.place}"
        return (
            f"{self} {whose}. This one, {database.backend.place}, would remove files that it does not know: set "
            "FLOPWATCH_DATABASE_URL or FLOPWATCH_ARTIFACTS_URL as they were; or, if it took the place of another one "
            "that nobody uses any more, run `flopwatch prune --claim-files`."
        ), note is not None
