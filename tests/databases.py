"""Migrated databases, copied from one that this process has migrated: a migration takes longer than most tests."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from app.settings import Settings
from app.store.database.engine import open_database


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory(prefix="flopwatch-migrated-") as folder:
        settings = Settings(data_dir=Path(folder))
        open_database(settings).close()
        return (settings.data_dir / "flopwatch.sqlite3").read_bytes()


def put_database(data_dir: Path) -> Path:
    """Put an empty database of the present version into the folder, which is made if it is missing."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = data_dir / "flopwatch.sqlite3"
    file.write_bytes(_migrated())
    return file
