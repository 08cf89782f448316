"""Copies a SQLite database into an empty one on PostgreSQL, for `flopwatch move`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Table, Text, bindparam, func, insert, select, type_coerce

from app.errors import CannotRunHere, Conflict
from app.store import tables
from app.store.column_types import StoredJson, without_nul
from app.store.database.engine import Database
from app.store.database.moved import mark_moved, unmark

METADATA = tables.job.metadata
ROWS_AT_ONCE = 1000
BYTES_AT_ONCE = 16 << 20
"""About the most of a batch's samples, tables and texts."""


def refuse_other_moves(source: Database, to: str) -> None:
    """Raise CannotRunHere unless SQLite would move to PostgreSQL, before anything is made at the URL."""
    if source.backend.engine.dialect.name != "sqlite" or not to.startswith("postgresql"):
        raise CannotRunHere("A data folder with SQLite moves to PostgreSQL: give --to a postgresql+psycopg:// URL.")


def copy_everything(source: Database, target: Database) -> dict[str, int]:
    """Copy all rows in one transaction of the target; returns their number by table. Nobody can write to the source
    meanwhile. It is marked as moved first, and the mark goes if the copy fails: the one that a killed process leaves
    has to be taken away by hand, but never are two databases in use. Raises Conflict if the target has rows, and
    CannotRunHere if it has not got every row."""
    with source.write() as old:
        mark_moved(old, target.backend.place)
    try:
        return _copied(source, target)
    except BaseException:
        with source.write() as old:
            unmark(old)
        raise


def _copied(source: Database, target: Database) -> dict[str, int]:
    place = target.backend.place
    with source.write() as old:
        unmark(old)  # for the copy; comes back if this process ends here
        # PostgreSQL's server ends a transaction that waits for long, as for SQLite to count millions of rows.
        counts = {table.name: _count(old, table) for table in METADATA.sorted_tables}
        with target.migration() as new:
            _copy(old, new, counts, place)
        mark_moved(old, place)
    return counts


def _copy(old: Connection, new: Connection, counts: Mapping[str, int], place: str) -> None:
    every = METADATA.sorted_tables  # a table comes after those that it refers to
    taken = [table.name for table in every if _count(new, table)]
    if taken:
        raise Conflict(f"{place} has rows ({', '.join(taken)}): give a database of its own.")
    for table in every:
        for rows in _batches(old, table):
            new.execute(_insertion(table), rows)
    missing = [table.name for table in every if _count(new, table) != counts[table.name]]
    if missing:
        raise CannotRunHere(f"The copy lacks rows of {', '.join(missing)}; nothing was kept of it.")
    _continue_ids(old, new)


def _batches(old: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in the order of their keys; JSON as it is stored, also if it cannot be read."""
    kept_as_json = {column.name for column in table.c if isinstance(column.type, StoredJson)}
    columns = [type_coerce(one, Text).label(one.name) if one.name in kept_as_json else one for one in table.c]
    rows: list[dict[str, Any]] = []
    size = 0
    query = select(*columns).order_by(*table.primary_key.columns)
    for row in old.execute(query, execution_options={"yield_per": 100}).mappings():
        rows.append({f"of_{name}": _text_of(value) if name in kept_as_json else value for name, value in row.items()})
        size += sum(len(value) for value in row.values() if isinstance(value, (bytes, str)))
        if len(rows) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _text_of(stored: Any) -> str | None:
    """Return the JSON of a value as SQLite gives it back: a number is no text there."""
    if stored is None:
        return None
    return without_nul(stored) if isinstance(stored, str) else json.dumps(stored)


def _insertion(table: Table) -> Any:
    values = {
        column.name: bindparam(f"of_{column.name}", type_=Text() if isinstance(column.type, StoredJson) else None)
        for column in table.c
    }
    return insert(table).inline().values(values)


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def _continue_ids(old: Connection, new: Connection) -> None:
    """Let ids go on where they were, so that none of a deleted row comes again."""
    for name, last in old.exec_driver_sql("SELECT name, seq FROM sqlite_sequence").all():
        if last and name in METADATA.tables:
            new.exec_driver_sql(f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), {int(last)})")
