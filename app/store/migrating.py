"""Bring a database to this version's schema, with Alembic, whose scripts lie in the package `migrations`.

Revisions are numbered, and a script's file is named after its number, so that a database that is up to date is known
without importing Alembic (half a second).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, column, inspect, select, table

from app.errors import DatabaseNewer, InvalidEnvironment

if TYPE_CHECKING:
    from app.store.engine import Database


def migrations_folder() -> Path:
    """The folder of the `migrations` package, in the checkout or in the installed wheel."""
    spec = find_spec("migrations")
    if spec is None or spec.origin is None:
        raise InvalidEnvironment("The package `migrations` is not installed.")
    return Path(spec.origin).parent


def revisions() -> list[str]:
    """The numbers of this version's revisions, oldest first: "0001", …"""
    return sorted(path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))


def migrate(database: Database) -> None:
    """Upgrade `database` to the newest revision, under the write lock; raises DatabaseNewer for an unknown one."""
    known = revisions()
    with database.read() as connection:
        if _revision(connection, known) == known[-1]:
            return
    with database.migration() as connection:
        if _revision(connection, known) == known[-1]:  # another process was faster
            return
        _upgrade(connection)


def _revision(connection: Connection, known: list[str]) -> str | None:
    tables = inspect(connection).get_table_names()
    if "alembic_version" not in tables:
        if tables:
            raise InvalidEnvironment(
                f"The database is not Flopwatch's: it has tables ({', '.join(tables[:5])}), no version."
            )
        return None
    found = connection.execute(select(column("version_num")).select_from(table("alembic_version"))).scalar_one_or_none()
    if found is not None and found not in known:
        raise DatabaseNewer(
            f"The database is at revision {found}, and this Flopwatch knows none after {known[-1]}: "
            "upgrade Flopwatch, or point FLOPWATCH_DATA_DIR at another folder."
        )
    return str(found) if found is not None else None


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
