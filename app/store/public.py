"""Turns rows into the JSON-ready dicts that the API returns."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import WithJsonSchema
from sqlalchemy import Connection, Row, RowMapping, Table, select

from app.errors import NotFound
from app.states import JOB_STATES
from app.store import tables
from app.store.column_types import broken

MAX_ID = 2**63 - 1
"""The largest id. The database's integers have 64 bits; a number from a URL can have any length."""

NO_PROGRESS: dict[str, Any] = {"done": 0, "total": 0, "message": ""}

_INTERNAL = (
    "device_type", "devices", "exclusive_host", "requirements", "waiting_reason", "point", "metrics", "deleting",
    "version",
)  # fmt: skip
"""Columns of the table `job` that clients do not see. They see all others under the columns' names."""
_LAST = ("environment", "validity")
"""Long values stand at the end, for people who read the JSON."""
_PUBLIC = tuple(column.name for column in tables.job.c if column.name not in (*_INTERNAL, *_LAST))


def checked_id(number: int, what: str) -> int:
    """Return `number` if the database can have it as an id; else raise NotFound."""
    if not 0 < number <= MAX_ID:
        raise NotFound(f"There is no {what} {number}.")
    return number


def row_of(connection: Connection, table: Table, number: int) -> Row[Any]:
    """Return the row of a job or a sweep; raises NotFound."""
    row = connection.execute(select(table).where(table.c.id == checked_id(number, table.name))).one_or_none()
    if row is None:
        raise NotFound(f"There is no {table.name} {number}.")
    return row


Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


def rfc3339(time: datetime | None) -> str | None:
    """Write a UTC time with microseconds, ending in Z."""
    return None if time is None else time.isoformat(timespec="microseconds").replace("+00:00", "Z")


ATTEMPT_PARTS = ("logs", "units", "measurements", "tables", "artifacts")
"""The parts that each attempt has of its own. Without `?attempt=` clients get those of the last attempt."""


def values_of(row: Mapping[Any, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return these values of a row as JSON has them: times are texts."""
    return {name: rfc3339(row[name]) if isinstance(row[name], datetime) else row[name] for name in names}


def job_dict(
    row: RowMapping | Mapping[str, Any], waiting: str | None, *, out_of_memory: bool = False
) -> dict[str, Any]:
    """Make the public job, without its links, from a row of the table `job`. `waiting` says why it cannot start (see
    waiting.py); `out_of_memory`: it succeeded, and its only case ran out of memory."""
    return {
        **values_of(row, _PUBLIC),
        "progress": row["progress"] or NO_PROGRESS,
        "waiting": waiting,
        "outcome": "oom" if out_of_memory else None,
        **values_of(row, _LAST),
        "broken": broken(row),
    }


def sweep_dict(
    row: RowMapping | Mapping[str, Any], counts: Mapping[str, int], searches: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Make the public sweep, without its links, from a row of the table `sweep`. `counts` are the numbers of its points
    by the state of their latest job; `searches` are for an answer about this sweep alone."""
    return {
        **values_of(row, ("id", "name", "labels", "base", "grid", "exclude", "options", "fit")),
        "searches": searches,
        **values_of(row, ("created_at",)),
        "broken": broken(row),
        "counts": {state: counts.get(state, 0) for state in JOB_STATES},
    }


def artifact_dict(row: RowMapping, attempt: int | None = None) -> dict[str, Any]:
    """Make the public artifact from a row of the table `artifact` with its `unit_title`; `size` is in bytes."""
    names = ("name", "kind", "media_type", "size", "sha256", "attempt", "unit_index", "unit_title")
    return {**values_of(row, names), "url": artifact_url(row, attempt)}


def artifact_url(row: RowMapping, attempt: int | None = None) -> str:
    """Return the URL from which clients download an artifact: that of the last recorded attempt, or of `attempt`."""
    return f"/jobs/{row['job_id']}/artifacts/{quote(row['name'], safe='')}{of_attempt(attempt)}"


def of_attempt(attempt: int | None) -> str:
    """Return the query string that selects one attempt; an empty one for the last recorded attempt."""
    return "" if attempt is None else f"?attempt={attempt}"


def attempt_links(job_id: int, attempt: int) -> dict[str, str]:
    """Return the URLs of an attempt's parts."""
    return {name: f"/jobs/{job_id}/{name}{of_attempt(attempt)}" for name in ATTEMPT_PARTS}
