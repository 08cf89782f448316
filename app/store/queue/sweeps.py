"""Jobs of sweeps. A point that was resumed has several jobs, of which the latest counts.

Sweeps have thousands of jobs, and nobody else can write meanwhile, so a few statements change all of them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from sqlalchemy import ColumnElement, Connection, Select, Text, cast, func, insert, literal, select

from app.errors import Conflict
from app.specs import spec_adapter
from app.specs._code import RUNS_CODE
from app.specs._sweep import Point, member_name
from app.store import tables
from app.store.files.uploads import record_code_use
from app.store.queue import submission
from app.store.records import NewJob

_job, _event, _label = tables.job.c, tables.event.c, tables.job_label.c


def latest_jobs(sweep_ids: Sequence[int]) -> Select[tuple[int]]:
    """Build a query for the ids of the latest job of each point of these sweeps, for `job.id.in_(…)`.

    An index contains everything that it needs, so no job's row is read.
    """
    return select(func.max(_job.id)).where(_job.sweep_id.in_(sweep_ids)).group_by(_job.sweep_id, _job.point)


def newer_job_of_point(connection: Connection, job_id: int, sweep_id: int | None) -> int | None:
    """Return the id of the job that a resumed sweep has instead of this one; None if this one still counts."""
    if sweep_id is None:
        return None
    own = select(_job.point).where(_job.id == job_id).scalar_subquery()
    later = select(func.max(_job.id)).where(_job.sweep_id == sweep_id, _job.id > job_id, _job.point == own)
    newer: int | None = connection.execute(later).scalar_one()
    return newer


def counts(connection: Connection, sweep_ids: Sequence[int]) -> dict[int, dict[str, int]]:
    """Return the number of each sweep's points in each state. A point has the state of its latest job."""
    query = select(_job.sweep_id, _job.state, func.count()).where(_job.id.in_(latest_jobs(sweep_ids)))
    by_sweep: dict[int, dict[str, int]] = {}
    for sweep_id, state, number in connection.execute(query.group_by(_job.sweep_id, _job.state)):
        by_sweep.setdefault(sweep_id, {})[state] = number
    return by_sweep


def point_key(point: Mapping[str, int]) -> frozenset[tuple[str, int]]:
    """Return a hashable form of a point; equal points have equal ones."""
    return frozenset(point.items())


def points_without_jobs(connection: Connection, sweep_id: int, points: Sequence[Point]) -> list[Point]:
    """Return the points of the sweep that have no job any more, since every job was deleted."""
    of_sweep = select(_job.point).where(_job.sweep_id == sweep_id)
    known = {point_key(point) for point in connection.execute(of_sweep).scalars()}
    return [point for point in points if point_key(point.choice) not in known]


def job_of_point(sweep: Mapping[str, Any], point: Point) -> NewJob:
    """Make a new job for a point of `sweep`, a row of its table. Raises Conflict when the point's spec is invalid."""
    try:
        spec = spec_adapter.validate_json(to_json(point.spec))
    except ValidationError as invalid:
        values = ", ".join(f"{path} = {json.dumps(sweep['grid'][path][at])}" for path, at in point.choice.items())
        problems = "; ".join(error["msg"] for error in invalid.errors(include_url=False))
        raise Conflict(
            f"Sweep {sweep['id']} cannot be resumed: this version does not take its point {values}: {problems}. "
            "Submit a sweep without it."
        ) from invalid
    name = member_name(sweep["name"], sweep["grid"], point.choice)
    return NewJob(spec, name=name, labels=sweep["labels"], **sweep["options"], point=point.choice)


def last_job(connection: Connection) -> int:
    """Return the largest id of a job; 0 if there is none."""
    return int(connection.execute(select(func.coalesce(func.max(_job.id), 0))).scalar_one())


def repeat_unsuccessful(connection: Connection, sweep: Mapping[str, Any], now: datetime) -> int:
    """Insert a new job for each point whose latest one failed or was cancelled, for `complete`; returns how many."""
    assigned = {"labels": sweep["labels"], **sweep["options"], "sweep_id": sweep["id"], **submission.queued(now)}
    same = ("name", *submission.SPEC_COLUMNS)
    copied = [_job[column] for column in same]
    # A running job whose cancel was requested counts as cancelled: it will end so, whatever it measures.
    is_being_cancelled = (_job.state == "running") & _job.cancel_requested_at.is_not(None)
    without_result = _job.state.in_(("failed", "cancelled")) | is_being_cancelled
    ended = select(*copied, *(literal(value, _job[column].type) for column, value in assigned.items())).where(
        _job.id.in_(latest_jobs([sweep["id"]])), without_result
    )
    repeated = insert(tables.job).from_select([*same, *assigned], ended.order_by(_job.id))
    return connection.execute(repeated, execution_options={"preserve_rowcount": True}).rowcount


def complete(connection: Connection, sweep_id: int, labels: Mapping[str, str], after: int, now: datetime) -> None:
    """Add labels, first events and the use of uploaded code to the sweep's jobs with ids larger than `after`. Raises
    Conflict if an uploaded file that one of them names is gone."""
    new = (_job.sweep_id == sweep_id) & (_job.id > after)
    for key, value in labels.items():
        labelled = select(_job.id, literal(key, _label.key.type), literal(value, _label.value.type)).where(new)
        connection.execute(insert(tables.job_label).from_select(["job_id", "key", "value"], labelled))
    runs_code = cast(_job.requirements, Text).contains(RUNS_CODE, autoescape=True)
    with_code = select(_job.id, _job.requirements, _job.spec).where(new, runs_code)
    record_code_use(connection, connection.execute(with_code).mappings().all())
    record_events(connection, new, "state", submission.QUEUED_EVENT, now)


def record_events(
    connection: Connection, which: ColumnElement[bool], type_: str, data: Mapping[str, Any], now: datetime
) -> None:
    """Record the same event for every job that matches `which`."""
    said = {"type": type_, "data": data, "created_at": now}
    rows = select(_job.id, _job.attempt, *(literal(value, _event[column].type) for column, value in said.items()))
    into = insert(tables.event).from_select(["job_id", "attempt", *said], rows.where(which).order_by(_job.id))
    connection.execute(into)
