"""Write the next revision from what changed in app/store/tables.py: `python -m migrations "what it does"`."""

import argparse
import tempfile
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from sqlmodel.sql.sqltypes import AutoString

from app.store.column_types import StoredJson, UtcDateTime
from app.store.database.engine import Database
from app.store.database.migrating import migrations_folder, revisions


def plain_type(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Types of ours, in revisions to come, as SQLAlchemy's: a revision must not change when the code does."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, StoredJson):
        return 'sa.JSON().with_variant(sa.Text(), "postgresql")'
    if kind == "type" and isinstance(item, AutoString):
        return "sa.String()"
    return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m migrations", description=__doc__)
    parser.add_argument("message", help="what the revision does, as a sentence without its full stop")
    message = parser.parse_args().message
    number = f"{int(revisions()[-1]) + 1:04d}"
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{Path(folder) / 'current.sqlite3'}")
        database.migrate()
        with database.migration() as connection:
            config.attributes.update(connection=connection, render_item=plain_type)
            command.revision(config, message, autogenerate=True, rev_id=number)
        database.close()


if __name__ == "__main__":
    main()
