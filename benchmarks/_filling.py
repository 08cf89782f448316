"""A full database for the benchmarks of pages and tables, written by a few statements of SQL in half a minute.

It has finished jobs with a few measurements each, of which 1 in 20 has failed and has a label of its own; a sweep,
whose jobs have the cases and values of their points; queued jobs; and jobs of one large grid.
"""

from __future__ import annotations

import array
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy import ColumnElement, Connection, Integer, Text, cast, func, insert, literal, select, update

from app.errors import job_problem
from app.store import tables
from app.store.database.engine import Database
from benchmarks._shared import BATCH, copy_jobs, copy_rows
from tools.service import submit

TINY = {"kind": "benchmark", "model": {"size": "tiny"}}
BODY: dict[str, Any] = {"spec": TINY, "name": "latency", "labels": {"suite": "nightly"}}
ALONE = {**BODY, "labels": {**BODY["labels"], "run": "alone"}}
"""A job with a label that no other has."""
SOME = 20
"""1 job in so many has failed, and has the label "team:some"."""
METRICS = ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "tokens_per_s", "tflops", "peak_memory_mib")
CELL_METRICS = 10
"""Metrics of each case of a job of one large grid."""
VALUES = ("mean", "median", "min", "max", "p05", "p25", "p75", "p95")
SAMPLES = zlib.compress(array.array("d", [1.5 + number / 997 for number in range(10)]).tobytes(), 1)
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Size:
    """The numbers of jobs and measurements in the database."""

    finished: int
    queued: int
    measurements: int
    side: int
    """The sweep has as many jobs as this number squared."""
    large: int
    """Measurements of the large job."""


@dataclass
class Filled:
    """Ids of the jobs and sweeps that the requests ask for."""

    done: int
    large: int
    queued: int
    sweep: int
    deletable: Iterator[int]


def fill(database: Database, client: httpx.Client, size: Size) -> Filled:
    """Write the jobs. Events, attempts and measurements are copied by SQL from those of a few jobs."""
    done, large, queued = (submit(client, body) for body in (BODY, ALONE, BODY))
    axis = list(range(size.side))
    grid = {"seed": axis, "context_length": [8 * (value + 1) for value in axis]}
    answer = client.post("/sweeps", json={"base": TINY, "grid": grid}, timeout=TIMEOUT_S).raise_for_status().json()
    of_sweep = size.side**2
    with database.write() as connection:
        finish_jobs(connection, tables.job.c.id != queued)
        copies = max(1, size.finished - of_sweep - 2)
        each = max(1, max(0, size.measurements - size.large) // (copies + of_sweep + 1))
        connection.execute(insert(tables.measurement), [_measurement(done, number) for number in range(each)])
        connection.execute(insert(tables.attempt), [attempt_row(job) for job in (done, large)])
        copy_rows(connection, (tables.attempt, tables.measurement), done, tables.job.c.sweep_id.is_not(None))
        _give_points(connection, answer["id"])
    insert_cells(database, large, size.large)
    finished = copy_jobs(database, done, copies)
    with database.write() as connection:
        _let_some_fail(connection, finished)
    copy_jobs(database, queued, size.queued - 1)
    return Filled(done, large, queued, answer["id"], itertools.chain(reversed(finished)))


def finish_jobs(connection: Connection, which: Any) -> None:
    """Let these jobs be finished."""
    now = tables.utc_now()
    values = {"state": "succeeded", "attempt": 1, "started_at": now, "finished_at": now}
    connection.execute(update(tables.job).where(which).values(**values))


def insert_cells(database: Database, job_id: int, count: int) -> None:
    """Insert measurements of a large grid, CELL_METRICS of each case, in transactions of BATCH rows."""
    columns = tables.measurement.c
    case = {"implementation": "eager", "dtype": "bf16", "causal": True, "head_dim": 64, "sequence_length": 0}
    plain = _measurement(job_id, 0, case=case)
    for start in range(0, count, BATCH):
        end = min(start + BATCH, count)
        number = select(literal(start, Integer).label("n")).cte("number", recursive=True)
        number = number.union_all(select(number.c.n + 1).where(number.c.n < end - 1))
        n: ColumnElement[int] = number.c.n
        cell = n // CELL_METRICS
        made: dict[str, ColumnElement[Any]] = {
            "case": func.json_set(literal(case, columns.case.type), "$.sequence_length", cell),
            "case_key": func.printf("%020d", cell),
            "metric": literal("metric_") + cast(n % CELL_METRICS, Text),
            **{name: _spread_out(literal(plain[name]), n) for name in VALUES},
        }
        rows = [made.get(name, literal(value, columns[name].type)) for name, value in plain.items()]
        with database.write() as connection:
            connection.execute(insert(tables.measurement).from_select(list(plain), select(*rows)))


def _spread_out(value: ColumnElement[float], number: ColumnElement[int]) -> ColumnElement[float]:
    """Return a value that differs from number to number by up to 10 %."""
    return value * (1 + number * 37 % 997 / 9970.0)


def _give_points(connection: Connection, sweep_id: int) -> None:
    """Give the measurements of a sweep's jobs the case of their job, and values of their own."""
    job, measurement = tables.job.c, tables.measurement.c
    length = func.json_extract(cast(job.spec, Text), "$.context_length")
    of_job = select(length).where(job.id == measurement.job_id).scalar_subquery()
    values: dict[str, Any] = {
        "case": func.json_set(measurement.case, "$.context_length", of_job),
        "case_key": func.printf("%020d", of_job),
        **{name: _spread_out(measurement[name], measurement.id) for name in VALUES},
    }
    of_sweep = measurement.job_id.in_(select(job.id).where(job.sweep_id == sweep_id))
    connection.execute(update(tables.measurement).where(of_sweep).values(**values))


def _let_some_fail(connection: Connection, ids: Sequence[int]) -> None:
    job = tables.job
    some = job.c.id.between(ids[0], ids[-1]) & ((job.c.id - ids[0]) % SOME == 0)
    error = job_problem("timeout", "the job ran longer than its timeout_s, 60 s", log_head="", log_tail="")
    values = {"state": "failed", "error": error, "labels": {**BODY["labels"], "team": "some"}}
    connection.execute(update(job).where(some).values(**values))
    label = select(job.c.id, literal("team"), literal("some")).where(some)
    connection.execute(insert(tables.job_label).from_select(["job_id", "key", "value"], label))


def attempt_row(job_id: int) -> Mapping[str, Any]:
    """Return a job's only attempt."""
    now, log = tables.utc_now(), "step\n" * 200
    values = {"job_id": job_id, "number": 1, "token": "0", "worker_id": "worker", "state": "succeeded", "beat": 3}
    return {**values, "log": log, "started_at": now, "finished_at": now}


def _measurement(job_id: int, number: int, **changes: Any) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "attempt": 1,
        "unit_index": 0,
        "case": {"model": "tiny", "d_model": 128, "num_layers": 2, "context_length": 128, "precision": "fp32"},
        "case_key": "0123456789abcdef0123",
        "device_key": "1x CPU",
        "validity": "valid",
        "metric": METRICS[number % len(METRICS)] + ("" if number < len(METRICS) else f"_{number}"),
        "unit": "ms",
        "outcome": "ok",
        "partial": False,
        "n": 10,
        "samples": SAMPLES,
        "std": 0.0125,
        **dict.fromkeys(VALUES, 1.5),
        **changes,
    }
