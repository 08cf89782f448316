"""Baselines: named sets of results that later ones are compared with.

A baseline has cases, each on one device, and of each the jobs that measured it. Putting a job or a sweep into it
replaces the cases that those have, and leaves the others as they are. Several jobs that measured one case, as those of
a sweep over `seed`, are several samples of it.

Two kinds of results are never put into a baseline, since nothing can be judged against them: wrong ones, and invalid
ones, for which a check found that other work was measured than was asked for. Suspect results are, and every baseline
says which they are.

While a job is in a baseline it cannot be deleted, and pruning spares it (see deleting.py). Nothing else removes its
results: only jobs that failed or were cancelled can be retried, and a baseline has no such jobs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, tuple_, update
from sqlalchemy import case as sql_case

from app.errors import Conflict, InvalidRequest, NotFound
from app.specs import KINDS
from app.states import FINISHED_STATES, UNFIT, VERDICTS, worst
from app.store import tables
from app.store.database.engine import Database
from app.store.public import row_of, values_of
from app.store.queue import sweeps
from app.store.reading.measurements import recorded_attempts
from app.store.tables import utc_now
from flopwatch.text.cases import case_text

MAX_TITLE = 200
WRONG = "wrong"
"""Outcome of a case whose result is not that of the reference."""
MAX_NAMED = 5
"""Most baselines that the error for an unknown one names."""

_baseline, _case = tables.baseline.c, tables.baseline_case.c
_job, _measurement, _attempt = tables.job.c, tables.measurement.c, tables.attempt.c
_REPLACE = delete(tables.baseline_case).where(
    _case.baseline == bindparam("of"), _case.case_key == bindparam("case"), _case.device_key == bindparam("device")
)


@dataclass(frozen=True)
class ChangedBaseline:
    """A baseline after something was put into it."""

    baseline: dict[str, Any]
    is_new: bool
    left_out: list[dict[str, Any]]
    """The requested jobs that are not in it, as `job` and `why`: jobs of the sweep without complete results, and jobs
    with wrong or invalid ones."""
    suspect: list[dict[str, Any]]
    """The jobs in it that have suspect results, as `job` and `why`."""


@dataclass(frozen=True)
class BaselineCase:
    """A case of a baseline as one job measured it."""

    case_key: str
    device_key: str
    job_id: int
    sweep_id: int | None


class Baselines:
    """The baselines of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self, name: str, *, job: int | None = None, sweep: int | None = None, set_by: str | None = None
    ) -> ChangedBaseline:
        """Put the results of a job, or of the latest jobs of a sweep, into the baseline, in place of those of the same
        cases. Raises NotFound; Conflict if one is not finished, or nothing has complete, right and valid results;
        InvalidRequest for a comparison, whose sides may share a case."""
        with self._database.read() as connection:
            rows = _jobs(connection, job, sweep)
            good = _complete(rows, job, sweep)
            measured, attempts = _cases(connection, good)
        if not measured:
            what = f"Job {job} has" if sweep is None else f"The jobs of sweep {sweep} have"
            raise Conflict(f"{what} no measurements, so no case for a baseline.")
        cases = [row for row, verdict in measured if verdict not in UNFIT]
        unfit = [entry for verdict in UNFIT for entry in _with_verdict(measured, verdict)]
        if not cases:
            raise Conflict(
                f"Job {unfit[0]['job']}: {unfit[0]['why']}. Nothing can be judged against results that are wrong, or "
                "of other work than was asked for: see the job's verdict, and set one that is right and valid."
            )
        with self._database.write() as connection:
            _check_unchanged(connection, attempts)
            is_new = _touch(connection, name, set_by)
            replaced = {(row["case_key"], row["device_key"]) for row in cases}
            connection.execute(_REPLACE, [{"of": name, "case": case, "device": device} for case, device in replaced])
            connection.execute(insert(tables.baseline_case), [{"baseline": name, **row} for row in cases])
            baseline = _public(connection, [find_baseline(connection, name)])[0]
        left_out = [{"job": row.id, "why": _why(row)} for row in rows if row.state != "succeeded"]
        return ChangedBaseline(baseline, is_new, [*left_out, *unfit], _with_verdict(measured, "suspect"))

    def get(self, name: str) -> dict[str, Any]:
        """Return a baseline with its cases, each with the worst verdict of its jobs. Raises NotFound."""
        with self._database.read() as connection:
            baseline = _public(connection, [find_baseline(connection, name)])[0]
            query = select(tables.baseline_case, _job.kind).join(tables.job, _job.id == _case.job_id)
            rows = connection.execute(query.where(_case.baseline == name).order_by(_case.job_id, _case.case_key)).all()
            verdicts = {
                (case.job_id, case.case_key, case.device_key): case.verdict
                for case in _measured(connection, recorded_attempts(connection, baseline["jobs"]))
            }
            cases: dict[tuple[str, str], dict[str, Any]] = {}
            for row in rows:
                case = cases.setdefault(
                    (row.case_key, row.device_key),
                    {
                        "case_key": row.case_key,
                        "device_key": row.device_key,
                        "kind": row.kind,
                        "case": row.title,
                        "validity": None,
                        "jobs": [],
                    },
                )
                case["jobs"].append(row.job_id)
                case["validity"] = worst([case["validity"], verdicts.get((row.job_id, row.case_key, row.device_key))])
        return {**baseline, "cases": list(cases.values())}

    def page(self, limit: int = 50, after: str | None = None) -> tuple[list[dict[str, Any]], str | None]:
        """Return baselines by name, without their cases, and the cursor of the next page: the last name."""
        query = select(tables.baseline).order_by(_baseline.name).limit(limit + 1)
        if after is not None:
            query = query.where(_baseline.name > after)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
            baselines = _public(connection, rows[:limit])
        return baselines, rows[limit - 1].name if len(rows) > limit else None

    def delete(self, name: str) -> None:
        """Delete a baseline; its jobs stay. Raises NotFound."""
        with self._database.write() as connection:
            find_baseline(connection, name)
            connection.execute(delete(tables.baseline).where(_baseline.name == name))


def baselines_of(connection: Connection, job_id: int) -> dict[str, str | None]:
    """Return the names of the baselines that a job is in, each with the user who set it."""
    of_job = select(_case.baseline).where(_case.job_id == job_id)
    query = select(_baseline.name, _baseline.set_by).where(_baseline.name.in_(of_job)).order_by(_baseline.name)
    return {row.name: row.set_by for row in connection.execute(query)}


def cases_of_baseline(connection: Connection, name: str) -> list[BaselineCase]:
    """Return the cases of a baseline, with their jobs, oldest job first. Raises NotFound."""
    find_baseline(connection, name)
    query = select(_case.case_key, _case.device_key, _case.job_id, _job.sweep_id).where(_case.baseline == name)
    query = query.join(tables.job, _job.id == _case.job_id).order_by(_case.job_id, _case.case_key)
    return [BaselineCase(*row) for row in connection.execute(query)]


def find_baseline(connection: Connection, name: str) -> Row[Any]:
    """Return the row of a baseline. Raises NotFound, which names the latest others."""
    row = connection.execute(select(tables.baseline).where(_baseline.name == name)).one_or_none()
    if row is None:
        query = select(_baseline.name).order_by(_baseline.updated_at.desc()).limit(MAX_NAMED + 1)
        names = connection.execute(query).scalars().all()
        known = ", ".join([*names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])
        raise NotFound(f"There is no baseline {name!r}; {f'there is {known}' if known else 'there is none yet'}.")
    return row


def _touch(connection: Connection, name: str, set_by: str | None) -> bool:
    """Make the baseline, or note that it changes, and by whom; return True if it is new."""
    change = {"updated_at": utc_now(), "set_by": set_by}
    if connection.execute(update(tables.baseline).where(_baseline.name == name).values(change)).rowcount:
        return False
    connection.execute(insert(tables.baseline), {"name": name, "created_at": change["updated_at"], **change})
    return True


def _public(connection: Connection, rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    names = [row.name for row in rows]
    pairs = select(_case.baseline, _case.case_key, _case.device_key).where(_case.baseline.in_(names)).distinct()
    each = pairs.subquery()
    counted = connection.execute(select(each.c.baseline, func.count()).group_by(each.c.baseline))
    numbers = dict(map(tuple, counted))
    jobs: dict[str, list[int]] = {name: [] for name in names}
    of_sweeps: dict[str, set[int]] = {name: set() for name in names}
    query = select(_case.baseline, _case.job_id, _job.sweep_id).join(tables.job, _job.id == _case.job_id)
    for name, job_id, sweep_id in connection.execute(
        query.where(_case.baseline.in_(names)).distinct().order_by(_case.job_id)
    ):
        jobs[name].append(job_id)
        of_sweeps[name] |= {sweep_id} - {None}
    return [
        {
            **values_of(row._mapping, ("name", "created_at", "updated_at", "set_by")),
            "number_of_cases": numbers.get(row.name, 0),
            "jobs": jobs[row.name],
            "sweeps": sorted(of_sweeps[row.name]),
            "links": {"self": f"/baselines/{quote(row.name, safe='')}"},
        }
        for row in rows
    ]


def _jobs(connection: Connection, job: int | None, sweep: int | None) -> list[Row[Any]]:
    """Return the job, or the latest job of each point of the sweep."""
    if job is not None:
        return [row_of(connection, tables.job, job)]
    assert sweep is not None
    row_of(connection, tables.sweep, sweep)
    query = select(_job.id, _job.kind, _job.state, _job.error).where(_job.id.in_(sweeps.latest_jobs([sweep])))
    return list(connection.execute(query.order_by(_job.id)))


def _why(row: Row[Any]) -> str:
    code = (row.error or {}).get("code", row.state)
    return str(row.state if code == row.state else f"{row.state} ({code})")


def _complete(rows: Sequence[Row[Any]], job: int | None, sweep: int | None) -> list[Row[Any]]:
    """Return the jobs that succeeded, since others may have measured only a part of their cases. Raises Conflict if one
    is not finished, or none has succeeded, and InvalidRequest for a comparison."""
    unfinished = [row for row in rows if row.state not in FINISHED_STATES]
    good = [row for row in rows if row.state == "succeeded"]
    if job is not None and unfinished:
        raise Conflict(f"Job {job} is {unfinished[0].state}: wait for its end.")
    if unfinished:
        raise Conflict(f"Sweep {sweep} is not finished: {len(unfinished)} jobs are on their way. Wait for its end.")
    if job is not None and not good:
        raise Conflict(f"Job {job} is {_why(rows[0])}, so its results may be incomplete: set one that succeeded.")
    if not good:
        raise Conflict(f"No job of sweep {sweep} has succeeded: resume it, or set another one.")
    for row in good:
        if row.kind in KINDS and KINDS[row.kind].has_sides:
            detail = f"Job {row.id} is of kind {row.kind}, whose sides may share a case: set a job of one side alone."
            raise InvalidRequest.at("/job" if sweep is None else "/sweep", detail)
    return good


def _cases(
    connection: Connection, jobs: Sequence[Row[Any]]
) -> tuple[list[tuple[dict[str, Any], str | None]], dict[int, int]]:
    """Return the rows of `baseline_case` for what these jobs measured, each with its verdict, or WRONG, and the attempt
    of each job that counts."""
    kinds = {row.id: row.kind for row in jobs}
    attempts = recorded_attempts(connection, list(kinds))
    cases = [
        (
            {
                "case_key": row.case_key,
                "device_key": row.device_key,
                "job_id": row.job_id,
                "title": _title(row.case, kinds[row.job_id]),
            },
            WRONG if row.is_wrong else row.verdict,
        )
        for row in _measured(connection, attempts)
    ]
    return cases, attempts


@dataclass(frozen=True)
class _Measured:
    """A case that a job measured on a device."""

    job_id: int
    case_key: str
    device_key: str
    case: Mapping[str, Any]
    verdict: str | None
    """The worst of its processes."""
    is_wrong: bool
    """True if a result of one of them was wrong."""


def _measured(connection: Connection, attempts: Mapping[int, int]) -> Iterator[_Measured]:
    """Yield each case and device that was measured by these attempts, given by job."""
    rank = sql_case(*((_measurement.validity == verdict, at) for at, verdict in enumerate(VERDICTS)), else_=None)
    identity = (_measurement.job_id, _measurement.case_key, _measurement.device_key)
    first, last = func.min(_measurement.id).label("first"), func.max(rank).label("worst")
    wrong = func.max(sql_case((_measurement.outcome == WRONG, 1), else_=0)).label("wrong")
    query = select(*identity, first, last, wrong).group_by(*identity)
    of_attempts = tuple_(_measurement.job_id, _measurement.attempt).in_(sorted(attempts.items()))
    each = query.where(_measurement.job_id.in_(attempts), of_attempts).subquery()
    named = select(each, _measurement.case).join(tables.measurement, _measurement.id == each.c.first)
    for row in connection.execute(named):
        verdict = None if row.worst is None else VERDICTS[row.worst]
        yield _Measured(row.job_id, row.case_key, row.device_key, row.case, verdict, bool(row.wrong))


def _with_verdict(measured: Sequence[tuple[Mapping[str, Any], str | None]], verdict: str) -> list[dict[str, Any]]:
    """Return the jobs that have cases with this verdict: `job`, and `why`, which counts and names them."""
    of_jobs: dict[int, list[str]] = {}
    totals = Counter(row["job_id"] for row, _ in measured)
    for row, its in measured:
        if its == verdict:
            of_jobs.setdefault(row["job_id"], []).append(row["title"])
    return [{"job": job_id, "why": _counted(titles, totals[job_id], verdict)} for job_id, titles in of_jobs.items()]


def _counted(titles: Sequence[str], total: int, verdict: str) -> str:
    if total == 1:
        return verdict
    return f"{len(titles)} of {total} cases {verdict}: {titles[0]}{', …' if len(titles) > 1 else ''}"


def _title(case: Mapping[str, Any], kind: str) -> str:
    text = case_text(KINDS[kind].displayed(case) if kind in KINDS else case)
    return text if len(text) <= MAX_TITLE else f"{text[: MAX_TITLE - 1]}…"


def _check_unchanged(connection: Connection, attempts: Mapping[int, int]) -> None:
    """Raise Conflict if one of the jobs was deleted, or is being deleted, since its cases were read."""
    query = select(_attempt.job_id, _attempt.number).where(_attempt.job_id.in_(attempts))
    known = {tuple(row) for row in connection.execute(query)}
    gone = [job_id for job_id, number in sorted(attempts.items()) if (job_id, number) not in known]
    if gone:
        raise Conflict(f"Job {gone[0]} is being deleted: set another one.")
