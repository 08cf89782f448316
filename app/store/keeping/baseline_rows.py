"""Reads the rows of baselines, for deleting and comparing; baselines.py writes them.

It imports nothing of the results, which import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from app.errors import NotFound
from app.store import tables

MAX_NAMED = 5
"""Most baselines that the error for an unknown one names."""

_baseline, _case = tables.baseline.c, tables.baseline_case.c


@dataclass(frozen=True)
class BaselineCase:
    """A case of a baseline as one job measured it."""

    case_key: str
    device_key: str
    job_id: int


def baselines_of(connection: Connection, job_id: int) -> list[str]:
    """Return the names of the baselines that a job is in."""
    query = select(_case.baseline).where(_case.job_id == job_id).distinct().order_by(_case.baseline)
    return list(connection.execute(query).scalars())


def cases_of_baseline(connection: Connection, name: str) -> list[BaselineCase]:
    """Return the cases of a baseline, with their jobs, oldest job first. Raises NotFound."""
    find_baseline(connection, name)
    query = select(_case.case_key, _case.device_key, _case.job_id).where(_case.baseline == name)
    return [BaselineCase(*row) for row in connection.execute(query.order_by(_case.job_id, _case.case_key))]


def find_baseline(connection: Connection, name: str) -> Row[Any]:
    """Return the row of a baseline. Raises NotFound, which names the latest others."""
    row = connection.execute(select(tables.baseline).where(_baseline.name == name)).one_or_none()
    if row is None:
        query = select(_baseline.name).order_by(_baseline.updated_at.desc()).limit(MAX_NAMED)
        known = ", ".join(connection.execute(query).scalars())
        raise NotFound(f"There is no baseline {name!r}; {f'there is {known}' if known else 'there is none yet'}.")
    return row
