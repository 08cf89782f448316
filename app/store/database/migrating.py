"""Migrates a database to this version's schema, with Alembic, whose scripts are in the package `migrations`.

Revisions are numbered, and a script's file is named after its number, so that a database that is up to date is known
without importing Alembic (half a second).
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

from app.errors import DatabaseNewer, InvalidEnvironment

logger = logging.getLogger(__name__)


def migrations_folder() -> Path:
    """Return the folder of the `migrations` package, in the checkout or in the installed wheel."""
    spec = find_spec("migrations")
    if spec is None or spec.origin is None:
        raise InvalidEnvironment("The package `migrations` is not installed.")
    return Path(spec.origin).parent


def revisions() -> list[str]:
    """Return the numbers of this version's revisions, oldest first: "0001", …"""
    return sorted(path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))


def is_current(connection: Connection) -> bool:
    """Return True if the database has this version's schema. Raises DatabaseNewer if a newer version wrote it, and
    InvalidEnvironment if it is not Flopwatch's.
    """
    known = revisions()
    return _revision(connection, known) == known[-1]


def upgrade(connection: Connection) -> None:
    """Upgrade the schema and the rows to this version, in the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = revisions()
    before = _revision(connection, known)
    if before is not None:
        logger.warning("migrating the database from revision %s to %s: there is no way back", before, known[-1])
    command.upgrade(config, "head")


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
