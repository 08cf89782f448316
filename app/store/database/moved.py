"""The mark of a database that moved to another server: no process uses it from then on (see moving.py)."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from app.errors import CannotRunHere
from app.store import tables

_setting = tables.setting.c
_IS_MARK = _setting.name == "moved_to"


def mark_moved(connection: Connection, place: str) -> None:
    """Say that the database is at another place now."""
    unmark(connection)
    connection.execute(insert(tables.setting), {"name": "moved_to", "value": place})


def unmark(connection: Connection) -> bool:
    """Let the database be used again; returns False if it had no mark."""
    return bool(connection.execute(delete(tables.setting).where(_IS_MARK)).rowcount)


def refuse_moved(connection: Connection, place: str) -> None:
    """Raise CannotRunHere for a database that has moved."""
    moved_to = connection.execute(select(_setting.value).where(_IS_MARK)).scalar_one_or_none()
    if moved_to is not None:
        raise CannotRunHere(
            f"{place} moved to {moved_to}: set FLOPWATCH_DATABASE_URL for this process, too. To go back to this copy, "
            "without what came later: flopwatch move --undo."
        )
