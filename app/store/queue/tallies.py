"""Counts what happens to jobs, in the transaction in which it does. The numbers outlive the jobs, and every server of a
database reports the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Connection, bindparam, insert, select, update

from app.store import tables

Name = Literal["claims", "outcomes", "lease_losses"]
Observed = Literal["waiting", "duration"]
BOUNDS_S = (1, 10, 60, 300, 900, 3600, 14_400, 86_400)
BOUNDS = (*map(str, BOUNDS_S), "+Inf")
"""The upper bounds of a histogram's buckets; changing them would need a migration."""

_tally = tables.tally.c
_ADD = (
    update(tables.tally)
    .where(
        _tally.name == bindparam("of_name"), _tally.kind == bindparam("of_kind"), _tally.outcome == bindparam("of_end")
    )
    .values(number=_tally.number + bindparam("more"))
)


def add(connection: Connection, name: str, kind: str, outcome: str = "", number: int = 1) -> None:
    """Add to a number. Writers take turns, so no other can insert its row meanwhile."""
    found = connection.execute(_ADD, {"of_name": name, "of_kind": kind, "of_end": outcome, "more": number}).rowcount
    if found == 0:
        row = {"name": name, "kind": kind, "outcome": outcome, "number": number}
        connection.execute(insert(tables.tally), row)


def observe(connection: Connection, name: Observed, kind: str, outcome: str, seconds: float) -> None:
    """Add a time to a histogram: one to the count of its bucket, and the time to the sum in milliseconds."""
    bound = next((str(bound) for bound in BOUNDS_S if seconds <= bound), "+Inf")
    add(connection, f"{name}_le_{bound}", kind, outcome)
    add(connection, f"{name}_ms", kind, outcome, round(seconds * 1000))


def outcome_of(state: str, error: Mapping[str, Any] | None) -> str:
    """Return how a job ended in one word: succeeded, or its error's code."""
    return state if error is None else str(error.get("code", state))


@dataclass
class Histogram:
    """Times of one kind with one outcome: how many there are up to each bound in seconds, and their sum in seconds."""

    counts: dict[str, int]
    sum_s: float = 0.0


def all_of(connection: Connection) -> tuple[list[tuple[str, str, str, int]], dict[tuple[str, str, str], Histogram]]:
    """Return every number, as name, kind, outcome, number; and the histograms by name, kind and outcome."""
    query = select(_tally.name, _tally.kind, _tally.outcome, _tally.number)
    numbers: list[tuple[str, str, str, int]] = []
    histograms: dict[tuple[str, str, str], Histogram] = {}
    for name, kind, outcome, number in connection.execute(query.order_by(_tally.name, _tally.kind, _tally.outcome)):
        observed, _, part = name.partition("_")
        if observed not in get_args(Observed):
            numbers.append((name, kind, outcome, number))
            continue
        histogram = histograms.setdefault((observed, kind, outcome), Histogram(dict.fromkeys(BOUNDS, 0)))
        if part == "ms":
            histogram.sum_s = number / 1000
        else:
            for bound in BOUNDS[BOUNDS.index(part.removeprefix("le_")) :]:
                histogram.counts[bound] += number
    return numbers, histograms
