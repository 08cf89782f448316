"""Settings of the whole service, which lie in its database: every process that shares it has the same values."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from app.store import tables

_setting = tables.setting.c
_GET = select(_setting.value).where(_setting.name == bindparam("of_name"))
_CHANGE = update(tables.setting).where(_setting.name == bindparam("of_name"))


def get(connection: Connection, name: str) -> Any:
    """Return the setting's value; None when it has none."""
    return connection.execute(_GET, {"of_name": name}).scalar_one_or_none()


def put(connection: Connection, name: str, value: Any) -> None:
    """Give the setting a value, which JSON can express and which is not None."""
    if connection.execute(_CHANGE, {"of_name": name, "value": value}).rowcount == 0:
        connection.execute(insert(tables.setting), {"name": name, "value": value})
