"""The differences between the databases: every engine has a class with these methods, in a module of its own."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine

from app.errors import FlopwatchError


class ChangeCounter(Protocol):
    """A value that every commit of another connection changes, once others can see the commit."""

    period_s: float
    """Seconds between two looks, which cost more on some engines."""

    def value(self) -> object: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One database, as Database needs it."""

    engine: Engine
    """A transaction with the execution option `begin` = "IMMEDIATE" writes, inside `write_lock`; others read one
    snapshot."""

    @property
    def place(self) -> str:
        """Where the database is, for people; without a password."""
        ...

    def identity(self, connection: Connection) -> str:
        """Return what tells the database from its copies, in other words than where it is."""
        ...

    @property
    def size(self) -> int:
        """The database's size in bytes."""
        ...

    def prepare(self) -> None:
        """Make what a database needs before it is opened. Raises CannotRunHere when this one cannot be used."""
        ...

    def refuse_missing(self) -> None:
        """Raise CannotRunHere when there is no database, without making one."""
        ...

    def write_lock(self) -> AbstractContextManager[None]:
        """Take this process's place among the writers. Raises DatabaseBusy."""
        ...

    def migration(self, timeout_s: float) -> AbstractContextManager[Connection]:
        """Begin a write transaction in which the schema may change."""
        ...

    def probe(self, timeout_s: float | None) -> None:
        """Make a write that changes no data."""
        ...

    def change_counter(self) -> ChangeCounter: ...

    def translate(self, error: Exception) -> FlopwatchError | None:
        """Return the project's error for an error of the driver, or None when there is none."""
        ...

    def spare_pages(self, connection: Connection) -> int:
        """Return the number of free pages that `cut_pages` would return to the disk."""
        ...

    def cut_pages(self, connection: Connection) -> int:
        """Return some free pages to the disk; returns their number."""
        ...

    def checkpoint(self) -> None:
        """Truncate the write-ahead log, where that is not the engine's own business."""
        ...

    def backup(self, target: Path) -> None:
        """Write a consistent copy into the new file `target`. Raises CannotRunHere, which names another way."""
        ...

    def close(self) -> None: ...

    def forget(self) -> None:
        """In a forked child: drop the parent's connections without closing them."""
        ...
