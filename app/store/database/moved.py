"""Databases that are at another place: one with the mark of a move (see moving.py), and one that the data folder's
files belong to. No process uses SQLite in the folder then."""

import json
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.errors import CannotRunHere
from app.settings import Settings
from app.store import service_settings

NOTE = "owner.json"
"""The note that names the database of the files beside it (see files/owner.py)."""

_MARK = "moved_to"


def mark_moved(connection: Connection, place: str) -> None:
    """Say that the database is at another place now."""
    service_settings.put(connection, _MARK, place)


def unmark(connection: Connection) -> bool:
    """Let the database be used again; returns False if it had no mark."""
    return service_settings.remove(connection, _MARK)


def refuse_moved(connection: Connection, place: str) -> None:
    """Raise CannotRunHere for a database that has moved."""
    moved_to = service_settings.get(connection, _MARK)
    if moved_to is not None:
        raise CannotRunHere(
            f"{place} moved to {moved_to}: set FLOPWATCH_DATABASE_URL for this process, too. To go back to this copy, "
            "without what came later: flopwatch move --undo."
        )


def refuse_elsewhere(settings: Settings) -> None:
    """Raise CannotRunHere where a first SQLite database would be made, or looked for, for a data folder whose files
    belong to a PostgreSQL database."""
    try:
        url = make_url(settings.resolved_database_url)
    except ArgumentError:  # which Database reports
        return
    if url.get_backend_name() != "sqlite" or Path(url.database or "").exists():
        return
    place = ""
    with suppress(OSError, ValueError, TypeError, KeyError):
        note = json.loads((settings.data_dir / "artifacts" / NOTE).read_bytes())
        place = note["place"] if str(note["database"]).startswith("postgresql") else ""
    if place:
        raise CannotRunHere(
            f"The files of {settings.data_dir} belong to the database {place}: set FLOPWATCH_DATABASE_URL for this "
            "process, too, or another FLOPWATCH_DATA_DIR."
        )
