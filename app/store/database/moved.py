"""The mark of a database that moved to another server: no process uses it from then on (see moving.py)."""

from __future__ import annotations

from sqlalchemy import Connection

from app.errors import CannotRunHere
from app.store import service_settings

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
