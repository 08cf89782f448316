"""Counts what happens to jobs, in the transaction in which it does. The numbers outlive the jobs, and every server of a
database reports the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, select, update

from app.store import tables

Name = Literal["claims", "outcomes", "lease_losses"]

_tally, _job = tables.tally.c, tables.job.c
_ADD = (
    update(tables.tally)
    .where(
        _tally.name == bindparam("of_name"), _tally.kind == bindparam("of_kind"), _tally.outcome == bindparam("of_end")
    )
    .values(number=_tally.number + bindparam("more"))
)


def add(connection: Connection, name: Name, kind: str, outcome: str = "", number: int = 1) -> None:
    """Add to a number. Writers take turns, so no other can insert its row meanwhile."""
    found = connection.execute(_ADD, {"of_name": name, "of_kind": kind, "of_end": outcome, "more": number}).rowcount
    if found == 0:
        row = {"name": name, "kind": kind, "outcome": outcome, "number": number}
        connection.execute(insert(tables.tally), row)


def add_outcomes(connection: Connection, which: ColumnElement[bool], outcome: str) -> None:
    """Count one outcome for every job that matches `which`."""
    for kind, number in connection.execute(select(_job.kind, func.count()).where(which).group_by(_job.kind)).all():
        add(connection, "outcomes", kind, outcome, number)


def outcome_of(state: str, error: Mapping[str, Any] | None) -> str:
    """Return how a job ended in one word: succeeded, or its error's code."""
    return state if error is None else str(error.get("code", state))


def all_of(connection: Connection) -> list[tuple[str, str, str, int]]:
    """Return every number, as name, kind, outcome, number."""
    query = select(_tally.name, _tally.kind, _tally.outcome, _tally.number)
    return [tuple(row) for row in connection.execute(query.order_by(_tally.name, _tally.kind, _tally.outcome))]
