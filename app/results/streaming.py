"""Writes tables that are too large to be made as a whole: JSON and CSV, part by part, in the order of submission.

The jobs, the varying coordinates and the metrics, and so the columns, are determined before the first row. Each part is
read in a transaction of its own, so that a slow reader holds none open. Jobs that finish, are deleted or run again
meanwhile are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from sqlalchemy import Row, select

from app.results.cases import Part
from app.results.pivoting import Plan, plan_of, refuse_several_kinds
from app.results.rendering import csv_lines, json_columns, scalar_columns, scalar_rows
from app.store import tables
from app.store.database.engine import Database
from app.store.reading import measurements
from app.table_options import Statistic

JOBS_PER_PART = 500
MEASUREMENTS_PER_PART = 20_000
"""Largest number of measurements that are read at once, except for a job that has more."""

StreamFormat = Literal["json", "csv"]


def is_too_large(database: Database, choice: measurements.Choice) -> bool:
    """Return True if the table has to be streamed. Raises NotFound."""
    with database.read() as connection:
        choice.check(connection)
        return measurements.is_too_large(connection, choice)


def stream(
    database: Database,
    format: StreamFormat,  # noqa: A002  (the query parameter's name)
    choice: measurements.Choice,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    statistic: Statistic = "mean",
) -> Iterator[str]:
    """Return the text of a table, in pieces. It has the shape of `render`, and always the columns `case_key` and `job`.

    The arguments are those of `pivoting.table`. JSON's `missing` is empty: each cell has its outcome.

    Raises:
        NotFound: there is no such job or sweep.
        InvalidRequest: no case has this coordinate or metric, or the jobs are of several kinds.
    """
    with database.read() as connection:
        choice.check(connection)
        if choice.kind is None or isinstance(choice.kind, str):
            refuse_several_kinds(measurements.kinds_of(connection, choice))
        cases = measurements.distinct_cases(connection, choice)
        unmeasured = measurements.unmeasured_specs(connection, choice)
        plan = plan_of(cases, unmeasured, measurements.distinct_metrics(connection, choice), rows, columns, statistic)
        job = tables.job.c.id
        jobs = list(connection.execute(select(job).where(*choice.conditions).order_by(job)).scalars())
    return _pieces(database, format, jobs, plan)


def _pieces(database: Database, format_: StreamFormat, jobs: Sequence[int], plan: Plan) -> Iterator[str]:
    spreads = plan.statistic == "mean"
    described = scalar_columns(plan.columns, spreads=spreads, traces=False)
    names = [column.name for column in described]
    if format_ == "csv":
        yield csv_lines([names])
    else:
        yield f'{{"columns": {json.dumps(json_columns(described))}, "rows": ['
    before = ""
    for found in _parts(database, jobs, plan):
        rows = scalar_rows(plan.columns, found, spreads=spreads, traces=False)
        if format_ == "csv":
            yield csv_lines(rows)
        elif rows:
            objects = (json.dumps(dict(zip(names, row, strict=True)), allow_nan=False) for row in rows)
            yield before + ",\n".join(objects)
            before = ",\n"
    if format_ == "json":
        yield f'], "next": null, "missing": [], "notes": {json.dumps(plan.notes)}}}'


def _parts(database: Database, job_ids: Sequence[int], plan: Plan) -> Iterator[list[list[Any]]]:
    """Yield the rows of some jobs at a time."""
    for start in range(0, len(job_ids), JOBS_PER_PART):
        with database.read() as connection:
            choice = measurements.Choice(jobs=job_ids[start : start + JOBS_PER_PART])
            jobs = measurements.jobs_of(connection, choice, JOBS_PER_PART)
            sizes = measurements.counts(connection, jobs)
        for part in _divided(jobs, sizes):
            with database.read() as connection:
                # A part is as large as its largest job, which its agent has bounded.
                measured = measurements.measurements(connection, part, plan.statistic, limited=False)
                read = Part.read(connection, part, plan.statistic, measured)
            yield plan.rows(read)


def _divided(jobs: Iterable[Row[Any]], sizes: dict[int, int]) -> Iterator[list[Row[Any]]]:
    part: list[Row[Any]] = []
    room = MEASUREMENTS_PER_PART
    for job in jobs:
        size = sizes.get(job.id, 0)
        if part and size > room:
            yield part
            part, room = [], MEASUREMENTS_PER_PART
        part.append(job)
        room -= size
    if part:
        yield part
