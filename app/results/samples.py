"""The samples of one metric of some jobs, case by case, for plots of distributions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, cast, or_, select, tuple_

from app.case_text import case_text
from app.results.cases import column_name, metric_names
from app.specs import Scalar
from app.store import tables
from app.store.database.engine import Database
from app.store.reading import measurements
from app.store.reading.packed import unpack

MAX_ROWS = 2000
"""Largest number of measurements that are read: a plot cannot show more processes and cases."""

_measurement = tables.measurement.c


@dataclass(frozen=True)
class CaseSamples:
    """The samples of a case in one job, of all processes, in the order of the processes."""

    job: int
    side: str | None
    """Its side in a job of kind `compare`; None in other jobs."""
    case: str
    """The case in words."""
    unit: str
    values: Sequence[float]


def samples_of(database: Database, jobs: Sequence[int], metric: str, coordinates: Sequence[str]) -> list[CaseSamples]:
    """Return the samples of a metric, named as its column, in each case of these jobs.

    `coordinates`: the coordinates that distinguish the cases; `case` names them.
    """
    names = ("job_id", "attempt", "unit_index", "metric", "phase", "unit", "samples")
    columns = [*(_measurement[name] for name in names), cast(_measurement.case, Text).label("case")]
    with database.read() as connection:
        chosen = measurements.choose_jobs(connection, jobs=jobs)
        recorded = measurements.recorded_attempts(connection, jobs)
        of_jobs = _measurement.job_id.in_(sorted(recorded))
        # Rows that are not wanted must not count towards the limit: other attempts, and other phases' metrics.
        counts = tuple_(_measurement.job_id, _measurement.attempt).in_(sorted(recorded.items()))
        query = select(*columns).where(of_jobs, counts, _has_column(metric), _measurement.samples.is_not(None))
        rows = connection.execute(query.order_by(_measurement.job_id, _measurement.id).limit(MAX_ROWS)).all()
        sides = measurements.sides(connection, chosen)
    found: dict[tuple[int, str | None, str], list[float]] = {}
    units: dict[tuple[int, str | None, str], str] = {}
    for row in rows:
        case = _case(row.case)
        told = case_text({name: case[name] for name in coordinates if case.get(name) is not None})
        key = (row.job_id, sides.get((row.job_id, row.attempt, row.unit_index)), told)
        found.setdefault(key, []).extend(value for value in unpack(row.samples) or () if value is not None)
        units[key] = row.unit
    return [CaseSamples(*key, unit=units[key], values=values) for key, values in found.items() if values]


def _has_column(column: str) -> ColumnElement[bool]:
    """Return the condition that a measurement has this column; see `column_name`."""
    words = column.split("_")
    phases = ["_".join(words[:end]) for end in range(1, len(words))]
    pairs = [(metric, phase) for metric in metric_names(column) for phase in phases]
    of_a_phase = tuple_(_measurement.metric, _measurement.phase).in_(
        sorted(pair for pair in pairs if column_name(*pair) == column)
    )
    return or_(and_(_measurement.metric == column, _measurement.phase.is_(None)), of_a_phase)


def _case(stored: str) -> Mapping[str, Scalar]:
    try:
        case: Any = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    return case if isinstance(case, dict) else {}
