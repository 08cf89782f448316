"""Migrates a database to this version's schema, with Alembic, whose scripts are in the package `migrations`.

Revisions are numbered, and a script's file is named after its number, so that a current database is recognised without
importing Alembic, which takes half a second. Numbers without a script belonged to development versions, whose
databases are refused.
"""

import logging
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

from app.errors import CannotRunHere, DatabaseNewer
from flopwatch.packages import FOLDER

logger = logging.getLogger(__name__)


def migrations_folder() -> Path:
    """Return the folder of the `migrations` package, in the checkout or in the installed wheel."""
    return Path(FOLDER, "migrations")


def revisions() -> list[str]:
    """Return the numbers of this version's revisions, oldest first: "0010", …"""
    return sorted(path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))


def is_current(connection: Connection) -> bool:
    """Return True if the database has this version's schema. Raises DatabaseNewer if a newer version wrote it, and
    CannotRunHere if a development version wrote it or it is not Flopwatch's."""
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
            raise CannotRunHere(
                f"The database is not Flopwatch's: it has tables ({', '.join(tables[:5])}), no version."
            )
        return None
    revision = connection.execute(select(column("version_num")).select_from(table("alembic_version"))).scalar()
    if revision is None or revision in known:
        return revision
    if revision < known[-1]:
        raise CannotRunHere(
            f"A development version between releases wrote the database (revision {revision}): begin with an empty "
            "data folder, or check out the commit that wrote it."
        )
    raise DatabaseNewer(
        f"The database is at revision {revision}, and this Flopwatch knows none after {known[-1]}: "
        "upgrade Flopwatch, or point FLOPWATCH_DATA_DIR at another folder."
    )
