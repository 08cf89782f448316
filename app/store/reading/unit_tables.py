"""Reads the tables that units reported. Each unit's part of a table is stored whole."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from app.errors import Conflict
from app.store import tables
from app.store.column_types import broken
from app.store.database.engine import Snapshot
from app.store.public import row_of
from app.store.reading.measurements import recorded_attempt


@dataclass(frozen=True)
class TablePart:
    """The table that one unit reported under a name, without its rows."""

    id: int
    name: str
    unit_index: int
    columns: Sequence[Mapping[str, Any]]
    """{"name", "type", "unit"}"""
    row_count: int
    partial: bool

    def check(self) -> None:
        """Raise Conflict if the stored columns cannot be read."""
        if broken(vars(self)):
            raise self.cannot_be_read()

    def cannot_be_read(self) -> Conflict:
        return Conflict(f"What is stored of table {self.name!r}, unit {self.unit_index}, cannot be read any more.")


def table_parts(snapshot: Snapshot, job_id: int, attempt: int | None = None) -> tuple[str, list[TablePart]]:
    """Return the job's kind, and the parts that an attempt's units reported, by name and unit; by default those of the
    last attempt that recorded results. Raises NotFound."""
    kind, table = row_of(snapshot, tables.job, job_id).kind, tables.result_table.c
    columns = (table.id, table.name, table.unit_index, table.columns, table.row_count, table.partial)
    query = select(*columns).where(table.job_id == job_id, table.attempt == recorded_attempt(snapshot, job_id, attempt))
    rows = snapshot.execute(query.order_by(table.name, table.unit_index))
    return kind, [TablePart(*row) for row in rows]


def part_rows(snapshot: Snapshot, part: TablePart) -> list[list[Any]]:
    """Return all rows of a part. Raises Conflict when they cannot be read."""
    table = tables.result_table.c
    stored = snapshot.execute(select(table.rows).where(table.id == part.id)).scalar_one()
    try:
        rows: list[list[Any]] = json.loads(zlib.decompress(stored))
    except (ValueError, zlib.error) as error:
        raise part.cannot_be_read() from error
    return rows
