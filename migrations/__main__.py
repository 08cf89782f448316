"""Write the next revision from what changed in app/store/tables.py: `python -m migrations "what it does"`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config

from app.store.database.engine import Database
from app.store.database.migrating import migrations_folder, revisions


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
            config.attributes["connection"] = connection
            command.revision(config, message, autogenerate=True, rev_id=number)
        database.close()


if __name__ == "__main__":
    main()
