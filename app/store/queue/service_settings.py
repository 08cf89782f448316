"""Settings of the whole service, stored in its database: every process that shares the database has the same values."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from app.store import tables

LEASE_S = "lease_s"
"""Name of the lease in seconds (see lease.py)."""

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
