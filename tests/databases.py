"""Migrated databases, copied from one that this process has migrated: a migration takes longer than most tests.

Importing this module lets all engines of this process share the statements that they have compiled.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

from app.settings import Settings
from app.store.database.engine import open_database


def _share_statements() -> None:
    """Each test has an engine of its own, which would compile the same statements anew, for longer than it runs them.

    The engine's dialect is part of a statement's key.
    """
    shared: LRUCache[Any, Any] = LRUCache(2_000)
    make = Engine.__init__

    def make_sharing(self: Engine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._compiled_cache = shared

    def kind(dialect: DefaultDialect) -> tuple[type, type]:
        return type(dialect), dialect.statement_compiler

    def are_alike(self: DefaultDialect, other: object) -> bool:
        return isinstance(other, DefaultDialect) and kind(self) == kind(other)

    replaced: dict[str, Any] = {"__eq__": are_alike, "__hash__": lambda self: hash(type(self))}
    for name, method in replaced.items():
        setattr(DefaultDialect, name, method)
    vars_of_engines: Any = Engine
    vars_of_engines.__init__ = make_sharing


_share_statements()


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
