"""Keeps databases from deleting each other's files: a store has a note that names the database of its files.

To a database, a file that none of its rows names is rubbish. To another database, which was moved, restored or copied,
it may be a result. So only the owner removes files, and only the owner's server and workers use the store. A store
without a note gets one from the first database that knows every file in it.

A database has its files in one store, whose id both hold: a server or worker with another folder would find none of the
files, and leave its own where nobody looks for them.
"""

import json
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sqlalchemy import Connection, select

from app.errors import CannotRunHere, DiskFull
from app.store import service_settings, tables
from app.store.database.engine import Database
from app.store.database.moved import NOTE

logger = logging.getLogger(__name__)

_STORE = "files_store"
"""The setting of a database that has its store's {"id", "place"}."""


@dataclass(frozen=True)
class Owner:
    """A database as the owner of files."""

    files_id: str
    """The id that the database gives to its files; a copy of the database has it, too."""
    database: str
    """The identity that its copies do not have (SQLite.identity)."""
    place: str
    """Where it is, for people."""
    store: str = ""
    """The id of its store of files; a copy of the store has it, too. Empty in notes that lack it."""

    @property
    def key(self) -> tuple[str, str]:
        return self.files_id, self.database


def owner_of(database: Database, folder: Path | None = None) -> Owner:
    """Return the database as an owner; `folder` is the files' folder. A SQLite database beside it moves with it, so
    that no copy of both is a second owner: there its name suffices. A linked folder stays where it is."""
    with database.read() as connection:
        identity = database.backend.identity(connection)
        is_sqlite = connection.dialect.name == "sqlite"
    path = Path(place := database.backend.place)
    if is_sqlite and folder is not None and path.resolve().parent == folder.resolve().parent:
        identity = f"{path.resolve().name} in the folder above"
    return Owner(id_of_files(database), identity, place)


def id_of_files(database: Database) -> str:
    """Return the id of the database's files; it gets one when it has none."""
    name = "objects_id"
    return str(
        service_settings.agreed(
            database, name, lambda connection: service_settings.get(connection, name), secrets.token_hex(8)
        )
    )


class OwnedFiles(ABC):
    """Files with a note of their owner."""

    _said = ""
    """Why no file is removed, as the log has it."""

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

    def claim(self, database: Database, *, anew: bool = False) -> None:
        """Make the database the files' owner, whoever was; `anew` makes this its store, in place of another."""
        own = {"id": secrets.token_hex(8), "place": _on_this_host(self)}
        if anew:
            with database.write() as connection:
                if (_store_of(connection) or own)["place"] != own["place"]:
                    service_settings.put(connection, _STORE, own)
        store = service_settings.agreed(database, _STORE, _store_of, own)["id"]
        self.write_note(json.dumps(asdict(replace(self.owner_for(database), store=store)), indent=1).encode())

    def refuse_empty(self, database: Database) -> None:
        """Raise CannotRunHere if the database has no job, and there are files: as their owner it would remove all."""
        with database.read() as connection:
            has_jobs = connection.execute(select(tables.job.c.id).limit(1)).first() is not None
        if not has_jobs and self.has_unknown(database):
            raise CannotRunHere(
                f"{database.backend.place} has no job, and would remove every file of {self}: set "
                "FLOPWATCH_DATABASE_URL as it was; or, if nobody needs these files, delete them by hand."
            )

    def refuse_foreign(self, database: Database, *, dry: bool = False, is_copy: bool = False) -> None:
        """Raise CannotRunHere if the files belong to another database, or the database's are elsewhere (unless this is
        going to be a copy of them). Files that belong to none yet may be read and added to; the log says that none is
        removed. The first database to know all files becomes their owner, but not with `dry`."""
        why, is_owned = self._refusal(database, dry=dry, is_copy=is_copy)
        if why and is_owned:
            raise CannotRunHere(why)
        self._say(why)

    def may_remove(self, database: Database) -> bool:
        """Return True if the database is the owner, or has just become it; else say why it is not."""
        why, _ = self._refusal(database)
        self._say(why)
        return not why

    def _say(self, why: str) -> None:
        if why and why != self._said:
            logger.warning("no file is removed: %s", why)
        self._said = why

    def _refusal(self, database: Database, *, dry: bool = False, is_copy: bool = False) -> tuple[str, bool]:
        """Return why the database may not remove files, "" if it may; and whether there is an owner."""
        with database.read() as connection:
            store = _store_of(connection)
        try:
            note = self.read_note()
            if note is None and not self.has_unknown(database):
                if store is not None and store["place"] != _on_this_host(self) and not is_copy:
                    return self._elsewhere(database, store), True
                if not dry:
                    self.claim(database)
                return "", True
        except (OSError, DiskFull) as error:
            return f"{self}: the note of the files' owner, {NOTE}, cannot be read or written: {error}", False
        if note is None:
            whose = "has files that this database does not know, and no note of their owner"
        else:
            try:
                owner = Owner(**json.loads(note))
            except (ValueError, TypeError):
                whose = f"has a note of the files' owner, {NOTE}, that cannot be read"
            else:
                if owner.key == self.owner_for(database).key:
                    other = None if store is None or is_copy or owner.store == store["id"] else store
                    if other is not None and (owner.store or other["place"] != _on_this_host(self)):
                        return self._elsewhere(database, other), True
                    if not dry and (store is None or not owner.store):
                        self.claim(database)
                    return "", True
                whose = f"belongs to the database {owner.place}"
        return (
            f"{self} {whose}. This one, {database.backend.place}, would remove files that it does not know: set "
            "FLOPWATCH_DATABASE_URL or FLOPWATCH_ARTIFACTS_URL as they were; or, if no other database in use has files "
            "there, run `flopwatch prune --claim-files`."
        ), note is not None

    def _elsewhere(self, database: Database, store: Mapping[str, str]) -> str:
        return (
            f"The files of the database {database.backend.place} are in {store['place']}, and not in "
            f"{_on_this_host(self)}: set FLOPWATCH_DATA_DIR and FLOPWATCH_ARTIFACTS_URL as they were (hosts that share "
            "no folder need an object store: `flopwatch move --to s3://…`); or, if they have gone, run "
            "`flopwatch prune --claim-files`."
        )


def _store_of(connection: Connection) -> dict[str, str] | None:
    found: dict[str, str] | None = service_settings.get(connection, _STORE)
    return found


def _on_this_host(files: OwnedFiles) -> str:
    return str(files) if "://" in str(files) else f"{files} on {socket.gethostname()}"
