"""One metric of all points of a large sweep, for plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from app.metrics import is_rate
from app.specs import Scalar
from app.states import worst
from app.store.database.engine import Database
from app.store.reading.members import results_of_members
from app.summaries import summarise


class SweepPoint(NamedTuple):
    """One metric of a point of a sweep. See `app.summaries.Summary` for value, spread, n and outcome."""

    job: int
    values: Mapping[str, Scalar]
    """The point's value on each path of the grid."""
    value: float | None
    spread: float | None
    n: int | None
    outcome: str | None
    validity: str | None
    low: float | None
    high: float | None


def sweep_points(database: Database, sweep: Mapping[str, Any], metric: str) -> list[SweepPoint]:
    """Return one metric, named as its column, of all points of a sweep whose jobs have one case each. Tables have the
    same values, and take several times as long.
    """
    points = []
    for of_job in results_of_members(database, sweep, metric):
        summary = summarise(of_job.processes, of_job.planned_processes, of_job.stopped, rate=is_rate(metric, None))
        verdict = worst({row.validity for row in of_job.processes})
        points.append(SweepPoint(of_job.job, of_job.values, *summary[:4], verdict, summary.low, summary.high))
    return points
