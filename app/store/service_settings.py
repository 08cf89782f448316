"""Settings of the whole service, stored in its database: every process that shares the database has the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from app.store import tables

if TYPE_CHECKING:
    from app.store.database.engine import Database

T = TypeVar("T")

LEASE_S = "lease_s"
"""Name of the lease in seconds (see queue/lease.py)."""
SERVER = "server"
"""Name of {"version", "schema_number", "fingerprint"} of the server that started last, which workers compare (see
app/specs/_schema.py)."""


_setting = tables.setting.c
_GET = select(_setting.value).where(_setting.name == bindparam("of_name"))
_CHANGE = update(tables.setting).where(_setting.name == bindparam("of_name"))


def get(connection: Connection, name: str) -> Any:
    """Return the setting's value; None when it has none."""
    return connection.execute(_GET, {"of_name": name}).scalar_one_or_none()


def lease_s(connection: Connection) -> float | None:
    """Return the lease that all processes of the database have agreed on, in seconds; None before they have."""
    stored = get(connection, LEASE_S)
    return float(stored) if isinstance(stored, int | float) and stored > 0 else None


def put(connection: Connection, name: str, value: Any) -> None:
    """Store the setting's value, which must be representable as JSON and not None."""
    if connection.execute(_CHANGE, {"of_name": name, "value": value}).rowcount == 0:
        connection.execute(insert(tables.setting), {"name": name, "value": value})


def keep(database: Database, name: str, value: Any) -> None:
    """Store the setting's value; where it has this one, without a write."""
    with database.read() as connection:
        is_stored = get(connection, name) == value
    if not is_stored:
        with database.write() as connection:
            put(connection, name, value)


def remove(connection: Connection, name: str) -> bool:
    """Let the setting have no value; returns False if it had none."""
    return bool(connection.execute(delete(tables.setting).where(_setting.name == name)).rowcount)


def agreed(database: Database, name: str, read: Callable[[Connection], T | None], proposed: T) -> T:
    """Return the setting of all processes of the database; the first one that asks stores what it proposes."""
    with database.read() as connection:
        found = read(connection)
    if found is None:
        with database.write() as connection:
            found = read(connection)
            if found is None:  # no other process was faster
                found = proposed
                put(connection, name, found)
    return found
