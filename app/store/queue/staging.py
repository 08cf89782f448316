"""Writes large results in slices before the attempt's end, so that other writers never wait long.

Readers look only at attempts that have ended with results (`recorded_attempts`). So rows of an attempt that still runs
are invisible, and the short transaction that ends the attempt shows all of them at once. Until then the attempt is
marked `staged`. If the attempt never ends with them, for example because its worker is lost,
`Queue.delete_abandoned_results` deletes them.

Every slice passes the fence, which is also a heartbeat: a worker that writes for minutes keeps its lease.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, insert, literal_column, select, text, update

from app.store import tables
from app.store.records import Claim, Finish
from app.store.tables import utc_now

MAX_ROWS = 1000
"""Most rows of one slice: tens of milliseconds."""
MAX_BYTES = 2 << 20
"""Most bytes of samples and tables in one slice. A single row may have more."""
PAUSE_S = 0.01
"""Seconds between two slices, in which a writer that waits in another process wakes up and takes its turn."""

RESULT_TABLES = (tables.measurement, tables.result_table, tables.unit, tables.artifact)
_attempt = tables.attempt.c

_MARK = update(tables.attempt).where(_attempt.id == bindparam("attempt_id")).values(staged=bindparam("is_staged"))
_IS_MARKED = select(_attempt.staged).where(_attempt.id == bindparam("attempt_id"))
_LEFTOVER = (
    select(_attempt.id, _attempt.job_id, _attempt.number)
    .where(text("staged"), _attempt.state != literal_column("'running'"))
    .order_by(_attempt.id)
    .limit(1)
)

Slice = list[tuple[Table, list[dict[str, Any]]]]
"""Rows that are written together, by table."""


def slices(claim: Claim, finish: Finish, *, partial: bool) -> Iterator[Slice]:
    """Yield all results of an attempt, in order, in slices of at most MAX_ROWS and about MAX_BYTES."""
    rows: Slice = []
    count = size = 0
    for table, row in _rows(claim, finish, partial=partial):
        weight = len(row.get("samples") or row.get("rows") or b"")
        if count == MAX_ROWS or (count and size + weight > MAX_BYTES):
            yield rows
            rows, count, size = [], 0, 0
        if not rows or rows[-1][0] is not table:
            rows.append((table, []))
        rows[-1][1].append(row)
        count, size = count + 1, size + weight
    yield rows


def _rows(claim: Claim, finish: Finish, *, partial: bool) -> Iterator[tuple[Table, dict[str, Any]]]:
    of = {"job_id": claim.job_id, "attempt": claim.attempt}
    records: tuple[tuple[Table, Iterable[Any], Mapping[str, Any]], ...] = (
        (tables.unit, finish.units, {**of, "partial": partial}),
        (tables.measurement, finish.measurements, {**of, "partial": partial}),
        (tables.result_table, finish.tables, {**of, "partial": partial}),
        (tables.artifact, finish.artifacts, {**of, "created_at": utc_now()}),
    )
    for table, of_table, common in records:
        for record in of_table:
            yield table, {**common, **vars(record)}


def write(connection: Connection, rows: Slice) -> None:
    for table, of_table in rows:
        connection.execute(insert(table), of_table)


def mark(connection: Connection, attempt_id: int, *, is_staged: bool) -> None:
    """Say whether the attempt has results that do not count yet."""
    connection.execute(_MARK, {"attempt_id": attempt_id, "is_staged": is_staged})


def is_marked(connection: Connection, attempt_id: int) -> bool:
    """Return True if the attempt has results that do not count yet."""
    return bool(connection.execute(_IS_MARKED, {"attempt_id": attempt_id}).scalar_one_or_none())


def leftover(connection: Connection) -> tuple[int, int, int] | None:
    """Return id, job id and number of an attempt that ended without its staged results; None if there is none."""
    attempt = connection.execute(_LEFTOVER).one_or_none()
    return None if attempt is None else (attempt.id, attempt.job_id, attempt.number)


def unstage(connection: Connection, attempt_id: int, job_id: int, number: int) -> bool:
    """Delete one slice of the attempt's staged results. Returns False, and ends the mark, when none are left."""
    for table in RESULT_TABLES:
        some = select(table.c.id).where(table.c.job_id == job_id, table.c.attempt == number).limit(MAX_ROWS)
        if connection.execute(delete(table).where(table.c.id.in_(some))).rowcount:
            return True
    mark(connection, attempt_id, is_staged=False)
    return False
