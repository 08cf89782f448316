"""Queries for clients: they return public dicts and lists, ready for JSON. Every method reads one snapshot."""

import functools
import json
import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from sqlalchemy import Connection, Row, RowMapping, Select, Text, cast, func, select, tuple_

from app.columns import free_names, type_of
from app.errors import InvalidRequest, NotFound
from app.specs._schema import SCHEMA
from app.states import JOB_STATES, WORKER_STATES, JobState, WorkerState
from app.store import tables
from app.store.column_types import broken
from app.store.database.engine import Database
from app.store.public import (
    MAX_ID,
    artifact_dict,
    artifact_url,
    attempt_links,
    job_dict,
    rfc3339,
    row_of,
    sweep_dict,
    values_of,
)
from app.store.queue import fitting, sweeps
from app.store.queue.hosts import known_hosts
from app.store.queue.registration import ALIVE
from app.store.queue.waiting import CLAIMING, waiting_reasons
from app.store.reading.filters import JobFilter
from app.store.reading.measurements import check_attempt, last_recorded, recorded_attempt
from app.store.reading.members import out_of_memory
from app.store.reading.monitoring import by_state
from app.store.reading.packed import unpack
from app.store.reading.places import Place, places
from app.store.reading.usage import standing, usage
from flopwatch.table_options import Statistic
from flopwatch.text.numbers import finite

logger = logging.getLogger(__name__)

STATISTICS = ("n", "mean", "std", "median", *get_args(Statistic)[2:], "median_low", "median_high")
"""Columns of a measurement that describe its samples."""
FACTS = (
    "case_key", "device_key", "attempt", "unit_index", "unit_title", "phase", "metric", "unit", "outcome", "reason",
    "partial", "validity",
)  # fmt: skip
"""Columns of a measurement between its case's coordinates and its statistics."""
MAX_PAGE = 1000
MAX_PAGE_BYTES = 4 << 20
"""Largest size of specs, environments and verdicts on a page of jobs, and of grids on a page of sweeps. Jobs that do
not fit are on the next page; a page has at least one."""
MAX_MEASUREMENTS = 10_000
MAX_EVENT_BYTES = 1 << 20
"""A page of events ends with the one that reaches this size, as JSON: hundreds of clients may hold a page each."""
MAX_SAMPLES = 2_000_000
"""Most samples on a page of measurements. A measurement with more samples has a page of its own."""


_UNIT_FIELDS = ("attempt", "unit_index", "title", "side", "outcome", "reason", "partial", "environment", "validity")


class Reading:
    """The queries of one database for clients."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def job(self, job_id: int) -> tuple[dict[str, Any], int]:
        """Return the public job and its version, which grows with every change. Raises NotFound, as all below."""
        with self._database.read() as connection:
            row = row_of(connection, tables.job, job_id)
            waiting = waiting_reasons(connection, [row._mapping])
            lacking = out_of_memory(connection, [row._mapping])
        return job_dict(row._mapping, waiting.get(job_id), out_of_memory=job_id in lacking), row.version

    def jobs(
        self,
        state: JobState | None = None,
        kind: str | None = None,
        labels: Sequence[tuple[str, str]] = (),
        sweep: int | None = None,
        limit: int = 50,
        after: str | None = None,
        text: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        submitted_by: str | None = None,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the jobs that match everything given, newest first, and the cursor of the next page."""
        chosen = JobFilter(state, kind, labels, sweep, text, since, until, submitted_by)
        query = select(tables.job).where(*chosen.conditions)
        with self._database.read() as connection:
            job = tables.job.c
            large = (job.spec, job.environment, job.validity)
            rows, following = _page(connection, query, job.id, large, limit, after)
            waiting = waiting_reasons(connection, rows)
            lacking = out_of_memory(connection, rows)
        jobs = [job_dict(row, waiting.get(row["id"]), out_of_memory=row["id"] in lacking) for row in rows]
        return jobs, following

    def places(self, job_ids: Collection[int]) -> dict[int, Place]:
        """Return the places in the queue of the queued ones of these jobs, by id (see places.py)."""
        with self._database.read() as connection:
            return places(connection, job_ids)

    def usage(self, since: datetime) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return who used how much since then, and who competes now (see usage.py)."""
        with self._database.read() as connection:
            return usage(connection, since), standing(connection)

    def events(self, job_id: int, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """Return the job's events with an id above `after`, in order; see `events_page`."""
        return self.events_page(job_id, after, limit)[1]

    def events_page(
        self, job_id: int, after: int = 0, limit: int = 500
    ) -> tuple[JobState, list[dict[str, Any]], int | None]:
        """Return the job's state, its events with an id above `after`, in order, and the cursor of the next page.

        A page has at most `limit` events, and ends with the one that reaches MAX_EVENT_BYTES.
        """
        event = tables.event.c
        size = func.length(cast(event.data, Text)).label("size")
        query = select(tables.event, size).where(event.job_id == job_id, event.id > max(0, min(after, MAX_ID)))
        limit = min(limit, MAX_PAGE)
        rows: list[Row[Any]] = []
        total, following = 0, None
        with self._database.read() as connection:
            state = row_of(connection, tables.job, job_id).state
            for row in connection.execute(query.order_by(event.id).limit(limit + 1)):
                if len(rows) == limit or total >= MAX_EVENT_BYTES:
                    following = rows[-1].id
                    break
                rows.append(row)
                total += row.size
        names = ("id", "job_id", "attempt", "type", "data", "created_at")
        return state, [values_of(row._mapping, names) for row in rows], following

    def changed_jobs(self, after: int | None) -> tuple[set[int] | None, int]:
        """Return the jobs that have events with an id above `after`, and the last event's id; None if `after` is None.

        Writers take turns, so an event that is committed later has a greater id.
        """
        event = tables.event.c
        with self._database.read() as connection:
            if after is None:
                return None, connection.execute(select(func.max(event.id))).scalar_one() or 0
            rows = connection.execute(select(event.id, event.job_id).where(event.id > after).order_by(event.id)).all()
        return {job_id for _, job_id in rows}, rows[-1].id if rows else after

    def attempts(self, job_id: int) -> list[dict[str, Any]]:
        """Return every attempt that the job had, in order, including lost ones and those given back."""
        with self._database.read() as connection:
            row_of(connection, tables.job, job_id)
            rows = _attempts(connection, job_id)
        names = ("number", "worker_id", "state", "error", "started_at", "finished_at")
        return [{**values_of(row._mapping, names), "links": attempt_links(job_id, row.number)} for row in rows]

    def log(self, job_id: int, attempt: int | None = None) -> str:
        """Return the output of an attempt, by default of the last: as recorded at its end, or as reported so far."""
        return self.log_so_far(job_id, attempt)[0]

    def log_so_far(self, job_id: int, attempt: int | None = None) -> tuple[str, int]:
        """Return the output as `log` does, and the id of the job's last event, from which a follower misses no line."""
        event = tables.event.c
        with self._database.read() as connection:
            row_of(connection, tables.job, job_id)
            last = connection.execute(select(func.max(event.id)).where(event.job_id == job_id)).scalar_one() or 0
            attempts = _attempts(connection, job_id)
            if attempt is not None:
                check_attempt(connection, job_id, attempt)
                attempts = [row for row in attempts if row.number == attempt]
            if not attempts:
                return "", last
            recorded = select(tables.attempt.c.log).where(tables.attempt.c.id == attempts[-1].id)
            if (whole := connection.execute(recorded).scalar_one()) is not None:
                return str(whole), last
            query = select(event.type, event.data).where(
                event.job_id == job_id, event.attempt == attempts[-1].number, event.type.in_(("state", "log"))
            )
            text: list[str] = []
            for row in connection.execute(query.order_by(event.id)):
                if row.type == "log":
                    text.append(row.data.get("text", ""))
                elif "worker_id" in row.data:  # a claim: an earlier one that was given back had the same number
                    text.clear()
        return "".join(text), last

    def progress(self, job_id: int, limit: int = 300) -> list[dict[str, Any]]:
        """Return the last progress events of the job's current attempt, in order: data and created_at."""
        event, job = tables.event.c, tables.job.c
        current = select(job.attempt).where(job.id == job_id).scalar_subquery()
        query = select(event.data, event.created_at).where(
            event.job_id == job_id, event.type == "progress", event.attempt == current
        )
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(event.id.desc()).limit(limit)).all()
        return [values_of(row._mapping, ("data", "created_at")) for row in reversed(rows)]

    def samples(self, job_id: int, case_key: str | None = None, limit: int = 256) -> tuple[list[dict[str, Any]], int]:
        """Return the measurements of one case, by default the first, that have several samples: case, metric, phase,
        unit, unit_index, samples; and the number of processes that have such measurements.

        At most `limit` measurements, of the last attempt that recorded any: those of the first processes, each with all
        of its own. Only a single process that has more than `limit` is cut.
        """
        measurement = tables.measurement.c
        with self._database.read() as connection:
            attempt = recorded_attempt(connection, job_id, None)
            sampled = (measurement.job_id == job_id, measurement.attempt == attempt, measurement.n > 1)
            if case_key is None:
                first = select(measurement.case_key).where(*sampled).order_by(measurement.id).limit(1)
                case_key = connection.execute(first).scalar_one_or_none()
            names = ("case", "metric", "phase", "unit", "unit_index", "samples")
            # Other jobs have this case, too: the index on the job finds the rows.
            of_case = (*sampled, cast(measurement.case_key, Text) == case_key)
            query = select(*(measurement[name] for name in names)).where(*of_case)
            query = query.order_by(measurement.unit_index, measurement.id).limit(limit + 1)
            rows = connection.execute(query).mappings().all()
            processes, cut = len({row["unit_index"] for row in rows}), len(rows) > limit
            if cut:
                count = select(func.count(measurement.unit_index.distinct())).where(*of_case)
                processes = connection.execute(count).scalar_one()
        if cut:
            beyond = rows[-1]["unit_index"]
            rows = [row for row in rows if row["unit_index"] != beyond] or rows[:limit]
        return [{**row, "samples": unpack(row["samples"]) or []} for row in rows], processes

    def measurements(
        self,
        job_id: int,
        *,
        samples: bool = False,
        limit: int = MAX_MEASUREMENTS,
        after: str | None = None,
        attempt: int | None = None,
    ) -> dict[str, Any]:
        """Return the measurements of an attempt, by default of the last that recorded any: `columns`, `rows`, and
        `next`, a cursor or None.

        A row is one metric of one case, an object keyed by column name. The columns are the coordinates of this page's
        cases, then FACTS, STATISTICS in the row's unit, and with `samples` the raw samples, of which a
        page has at most MAX_SAMPLES. A coordinate with the name of another column is called "case.<name>".
        """
        limit = min(limit, MAX_MEASUREMENTS)
        measurement, unit = tables.measurement.c, tables.unit.c
        facts = [measurement["unit_index" if name == "unit_title" else name] for name in FACTS]
        columns = [measurement.id, cast(measurement.case, Text), *facts, *(measurement[name] for name in STATISTICS)]
        query = select(*columns, *([measurement.samples] if samples else [])).where(measurement.job_id == job_id)
        if after is not None:
            query = query.where(measurement.id > _cursor(after))
        with self._database.read() as connection:
            attempt = recorded_attempt(connection, job_id, attempt)
            query = query.where(measurement.attempt == attempt).order_by(measurement.id).limit(limit + 1)
            if samples:
                limit = _rows_within(connection.execute(query.with_only_columns(measurement.n)).scalars(), limit)
            rows = connection.execute(query.limit(limit + 1)).all()
            of_units = select(unit.unit_index, unit.title).where(unit.job_id == job_id, unit.attempt == attempt)
            titles = dict(map(tuple, connection.execute(of_units)))
        shown = rows[:limit]
        names, cases = _coordinates(dict.fromkeys(row[1] for row in shown))
        values = [_measurement(row, cases[row[1]], titles, samples=samples) for row in shown]
        return {
            "columns": _measurement_columns(names, cases.values(), samples=samples),
            "rows": values,
            "next": str(shown[-1][0]) if len(rows) > limit else None,
        }

    def first_values(
        self, job_ids: Collection[int], metrics: Collection[str], limit: int = 200
    ) -> dict[int, list[dict[str, Any]]]:
        """Return the values of these metrics of each job, by job id: metric, unit, outcome, median, case_key, is_cut.

        Of each job, it looks at the first `limit` measurements of the last attempt that recorded any; `is_cut` is true
        if there are more.
        """
        job, measurement, other = tables.job.c, tables.measurement.c, tables.measurement.alias().c
        recorded = last_recorded(job.id).label("attempt")
        chosen = select(job.id, recorded).where(job.id.in_(job_ids)).cte().prefix_with("MATERIALIZED")
        beyond = select(other.id).where(other.job_id == chosen.c.id, other.attempt == chosen.c.attempt)
        beyond = beyond.order_by(other.id).limit(1).offset(limit)
        bounds = select(chosen, beyond.scalar_subquery().label("beyond")).cte().prefix_with("MATERIALIZED")
        names = ("job_id", "case_key", "metric", "unit", "outcome", "median")
        is_cut = bounds.c.beyond.is_not(None).label("is_cut")
        query = select(*(measurement[name] for name in names), is_cut).where(
            measurement.job_id == bounds.c.id,
            measurement.attempt == bounds.c.attempt,
            measurement.id < func.coalesce(bounds.c.beyond, MAX_ID),
            measurement.metric.in_(metrics),
        )
        values: dict[int, list[dict[str, Any]]] = {}
        with self._database.read() as connection:
            for row in connection.execute(query.order_by(measurement.id)).mappings():
                values.setdefault(row["job_id"], []).append(dict(row))
        return values

    def sweep_heads(self, sweep_ids: Collection[int]) -> dict[int, tuple[str | None, list[str]]]:
        """Return the name of each of these sweeps and the paths that it varies, by its id."""
        sweep = tables.sweep.c
        query = select(sweep.id, sweep.name, sweep.grid, sweep.fit).where(sweep.id.in_(sweep_ids))
        heads = {}
        with self._database.read() as connection:
            for row in connection.execute(query):
                searched = [row.fit["axis"]] if row.fit else []
                heads[row.id] = (row.name, [*(path for path, values in row.grid.items() if len(values) > 1), *searched])
        return heads

    def units(self, job_id: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return the units of an attempt, by default of the last recorded one, in the plan's order, each with the files
        that it left."""
        unit, chosen = tables.unit.c, attempt
        with self._database.read() as connection:
            attempt = recorded_attempt(connection, job_id, attempt)
            query = select(tables.unit).where(unit.job_id == job_id, unit.attempt == attempt)
            rows = connection.execute(query.order_by(unit.unit_index)).mappings().all()
            artifacts = connection.execute(_artifacts(job_id, attempt)).mappings().all()
        return [
            {
                **values_of(row, _UNIT_FIELDS),
                "artifacts": [
                    {"name": file["name"], "url": artifact_url(file, chosen)}
                    for file in artifacts
                    if file["unit_index"] == row["unit_index"]
                ],
            }
            for row in rows
        ]

    def artifacts(self, job_id: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return the artifacts of an attempt, by default of the last recorded one, by name."""
        chosen = attempt
        with self._database.read() as connection:
            attempt = recorded_attempt(connection, job_id, attempt)
            return [artifact_dict(row, chosen) for row in connection.execute(_artifacts(job_id, attempt)).mappings()]

    def artifact(self, job_id: int, name: str, attempt: int | None = None) -> dict[str, Any]:
        """Return one artifact of an attempt, by default of the last recorded one."""
        chosen = attempt
        with self._database.read() as connection:
            attempt = recorded_attempt(connection, job_id, attempt)
            query = _artifacts(job_id, attempt).where(tables.artifact.c.name == name)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(f"Job {job_id} has no artifact {name!r}.")
        return artifact_dict(row, chosen)

    def workers(self, gone: int = 50) -> list[dict[str, Any]]:
        """Return the living workers and the `gone` newest of the others, in the order in which they registered."""
        worker = tables.worker.c
        newest_first = select(tables.worker).order_by(worker.registered_at.desc(), worker.id.desc())
        with self._database.read() as connection:
            alive = connection.execute(newest_first.where(worker.state.in_(ALIVE)).limit(MAX_PAGE)).all()
            others = connection.execute(newest_first.where(worker.state.not_in(ALIVE)).limit(gone)).all()
            rows = sorted((*alive, *others), key=lambda row: (row.registered_at, row.id))
            return _workers(connection, rows)

    def worker_page(
        self, state: WorkerState | None = None, limit: int = 50, after: tuple[datetime, str] | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return workers, the newest first, with the ids of the jobs that they run, and the cursor of the next page.

        after: the time at which the last worker of the previous page registered, and its id.
        """
        worker = tables.worker.c
        query = select(tables.worker).order_by(worker.registered_at.desc(), worker.id.desc())
        if state is not None:
            query = query.where(worker.state == state)
        if after is not None:
            query = query.where(tuple_(worker.registered_at, worker.id) < after)
        limit = min(limit, MAX_PAGE)
        with self._database.read() as connection:
            rows = connection.execute(query.limit(limit + 1)).all()
            page = _workers(connection, rows[:limit])
        return page, f"{page[-1]['registered_at']}_{page[-1]['id']}" if len(rows) > limit else None

    def worker_counts(self) -> dict[str, int]:
        with self._database.read() as connection:
            return by_state(connection, tables.worker.c.state, WORKER_STATES)

    def sweep(self, sweep_id: int) -> dict[str, Any]:
        """Return the public sweep, with the number of its points by the state of their latest job, and the standing of
        its searches."""
        with self._database.read() as connection:
            row = row_of(connection, tables.sweep, sweep_id)._mapping
            counts = sweeps.counts(connection, [sweep_id]).get(sweep_id, {})
            return sweep_dict(row, counts, fitting.searches(connection, row))

    def job_page_version(self, job_id: int) -> str:
        """Return a text that changes with everything that a job's page shows, except the reason to wait."""
        event = tables.event.c
        with self._database.read() as connection:
            version = row_of(connection, tables.job, job_id).version
            last = connection.execute(select(func.max(event.id)).where(event.job_id == job_id)).scalar_one()
        return f"{job_id}-{version}-{last}"

    def sweep_page_version(self, sweep_id: int) -> str:
        """Return a text that changes with the sweep's jobs: a job was added, was deleted or changed."""
        job = tables.job.c
        query = select(func.count(), func.max(job.id), func.sum(job.version)).where(job.sweep_id == sweep_id)
        with self._database.read() as connection:
            number, last, changes = connection.execute(query).one()
        return f"{sweep_id}-{number}-{last}-{changes}"

    def sweeps(self, limit: int = 50, after: str | None = None) -> tuple[list[dict[str, Any]], str | None]:
        """Return sweeps, newest first, and the cursor of the next page."""
        with self._database.read() as connection:
            sweep = tables.sweep.c
            large = (sweep.base, sweep.grid, sweep.exclude)
            rows, following = _page(connection, select(tables.sweep), sweep.id, large, limit, after)
            counts = sweeps.counts(connection, [row["id"] for row in rows])
        return [sweep_dict(row, counts.get(row["id"], {})) for row in rows], following

    def check(self) -> None:
        """Read something, to find out whether reading works; counting 100 000 jobs would take 10 ms."""
        with self._database.read() as connection:
            connection.execute(select(tables.job.c.id).limit(1)).all()

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        with self._database.read() as connection:
            return by_state(connection, tables.job.c.state, JOB_STATES)

    def known_names(self) -> dict[str, set[str]]:
        """Return the kinds and the capabilities that registered workers have; both empty if none ever registered."""
        with self._database.read() as connection:
            known = known_hosts(connection)
        return {
            "kinds": {kind for host in known for kind in host.kinds},
            "capabilities": {name for host in known for name in host.capabilities},
        }


def _attempts(connection: Connection, job_id: int) -> Sequence[Row[Any]]:
    """Return all columns of the job's attempts but `log`, which may be large."""
    attempt = tables.attempt.c
    columns = [column for column in attempt if column.name != "log"]
    return connection.execute(select(*columns).where(attempt.job_id == job_id).order_by(attempt.id)).all()


def _workers(connection: Connection, rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    """Return these rows of the table `worker` as public workers, with the ids of the jobs that they run."""
    job = tables.job.c
    running: dict[str, list[int]] = {}
    query = select(job.id, job.worker_id).where(job.state == "running").order_by(job.id)
    for job_id, worker_id in connection.execute(query):
        running.setdefault(worker_id, []).append(job_id)
    fields = ("id", "hostname", "pid", "state", "unfit", "kinds", "capabilities", "devices", "versions")
    return [
        {
            **values_of(row._mapping, fields),
            **_fitness(row),
            "readings": row.readings,
            "broken": broken(row._mapping),
            "job_ids": running.get(row.id, []),
            **values_of(row._mapping, ("registered_at", "last_seen_at")),
        }
        for row in rows
    ]


def _fitness(row: Row[Any]) -> dict[str, Any]:
    """Return state and `unfit` of a worker that is too old to know so itself; nothing of others."""
    if row.state not in CLAIMING or row.unfit is not None or (row.schema_number or 1) >= SCHEMA:
        return {}
    reason = "the server is newer: update this worker, and start it again"
    since = rfc3339(row.registered_at)
    return {"state": "unfit", "unfit": {"code": "too_old", "reason": reason, "since": since, "next_try_at": None}}


def _artifacts(job_id: int, attempt: int | None) -> Select[Any]:
    """Build a query for the artifacts of an attempt of a job by name, with the titles of their units."""
    artifact, unit = tables.artifact.c, tables.unit.c
    its_unit = (
        (unit.job_id == artifact.job_id) & (unit.attempt == artifact.attempt) & (unit.unit_index == artifact.unit_index)
    )
    joined = tables.artifact.outerjoin(tables.unit, its_unit)
    query = select(tables.artifact, unit.title.label("unit_title")).select_from(joined)
    return query.where(artifact.job_id == job_id, artifact.attempt == attempt).order_by(artifact.name)


def _page(
    connection: Connection, query: Select[Any], id_column: Any, large: Sequence[Any], limit: int, after: str | None
) -> tuple[Sequence[RowMapping], str | None]:
    """Return the rows of a page, newest first, and the cursor of the next one. The page ends before its columns `large`
    have more than MAX_PAGE_BYTES together, so sizes are read before rows."""
    limit = min(limit, MAX_PAGE)
    if after is not None:
        query = query.where(id_column < _cursor(after))
    sizes = [func.coalesce(func.length(cast(column, Text)), 0) for column in large]
    measured = query.with_only_columns(id_column, functools.reduce(operator.add, sizes))
    ids: list[int] = []
    room, following = MAX_PAGE_BYTES, None
    for row_id, size in connection.execute(measured.order_by(id_column.desc()).limit(limit + 1)):
        room -= size
        if len(ids) == limit or (ids and room < 0):
            following = str(ids[-1])
            break
        ids.append(row_id)
    if not ids:
        return [], None
    rows = connection.execute(select(id_column.table).where(id_column.in_(ids)).order_by(id_column.desc())).mappings()
    return rows.all(), following


def _cursor(after: str) -> int:
    if not (after.isascii() and after.isdecimal() and len(after) < len(str(MAX_ID))):
        raise InvalidRequest.at("/after", "This is no cursor of this list: pass `next` of the page before, as it is.")
    return int(after)


def _coordinates(stored: Iterable[str]) -> tuple[Collection[str], dict[str, dict[str, Any]]]:
    """Return the columns of these cases' coordinates, and the decoded values of each stored text."""
    cases: dict[str, dict[str, Any]] = {text: json.loads(text) for text in stored}
    every = dict.fromkeys(name for case in cases.values() for name in case)
    names = free_names(every, {*FACTS, *STATISTICS, "samples"}, "case")
    return names.values(), {
        text: {column: case.get(name) for name, column in names.items()} for text, case in cases.items()
    }


def _measurement(
    row: Sequence[Any], coordinates: Mapping[str, Any], titles: Mapping[int, str], *, samples: bool
) -> dict[str, Any]:
    """Make a public row from id, case, FACTS (with a unit's index in place of its title), STATISTICS, and maybe the
    samples."""
    end = 2 + len(FACTS)
    value = {**coordinates, **dict(zip(FACTS, row[2:end], strict=True))}
    value["unit_title"] = titles.get(value["unit_index"])
    value |= zip(STATISTICS, map(finite, row[end : end + len(STATISTICS)]), strict=True)
    if samples:
        value["samples"] = unpack(row[-1])
    return value


def _measurement_columns(
    coordinates: Iterable[str], cases: Collection[Mapping[str, Any]], *, samples: bool
) -> list[dict[str, Any]]:
    types: dict[str, str] = {
        name: "null" if all(case[name] is None for case in cases) else type_of(case[name] for case in cases)
        for name in coordinates
    }
    types |= dict.fromkeys(FACTS, "string") | {"attempt": "integer", "unit_index": "integer", "partial": "boolean"}
    types |= dict.fromkeys(STATISTICS, "number") | {"n": "integer"}
    if samples:
        types["samples"] = "array"
    return [{"name": name, "type": kind, "unit": None} for name, kind in types.items()]


def _rows_within(counts: Iterable[int | None], limit: int) -> int:
    """Return how many rows with these numbers of samples make a page: at least one, at most `limit`."""
    samples = rows = 0
    for count in counts:
        samples += count or 0
        if rows == limit or (rows and samples > MAX_SAMPLES):
            break
        rows += 1
    return max(rows, 1)
