"""One metric of one case over all jobs that measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.errors import InvalidRequest, NotFound
from app.metrics import Direction, better, column_name, headline, is_rate
from app.results.arranging import with_values
from app.results.environments import commit_of, revision_of, revision_text, short_version, version_of
from app.specs import KINDS, Scalar
from app.states import worst
from app.store.database.engine import Database, Snapshot
from app.store.public import Time, rfc3339
from app.store.reading import history as stored
from app.store.reading import measurements
from app.store.reading.history import HistoricJob, Row
from app.summaries import add_process, planned_processes, summarise
from flopwatch.text.cases import case_text
from flopwatch.text.values import value_text

MAX_POINTS = 2000
MAX_NAMED = 20
"""Most cases that the error for an ambiguous choice names."""


@dataclass(frozen=True)
class CaseChoice:
    """The case of a history. All conditions that are given hold; they must leave one case."""

    key: str | None = None
    """The key, or its beginning."""
    job: int | None = None
    """A case that this job measured."""
    coordinates: Sequence[tuple[str, str]] = ()
    """Coordinates with their values as texts."""


@dataclass(frozen=True)
class HistoryPoint:
    """The value of the metric in one job, on one device, and in a comparison on one side."""

    job: int
    side: str | None
    finished_at: Time | None
    device_key: str
    host: str | None
    value: float | None
    low: float | None
    """The interval of the median, to `high`."""
    high: float | None
    n: int | None
    """Number of samples, or of processes."""
    outcome: str | None
    validity: str | None
    version: str | None
    """The code that ran: see environments.py."""
    short_version: str | None
    commit: str | None
    """The git commit of that code, or the one that its changes are based on."""
    revision: str | None
    """Where uploaded code comes from: what its author calls it, the commit, and the changes in short."""
    baselines: Sequence[str]


@dataclass(frozen=True)
class History:
    """The points are in the order in which their jobs finished."""

    case_key: str
    kind: str
    coordinates: Mapping[str, Scalar]
    metric: str
    unit: str | None
    better: Direction | None
    metrics: Sequence[str]
    """All metrics of the case."""
    devices: Sequence[str]
    """The devices of the points."""
    hosts: Sequence[str]
    """Their hosts, as far as they are known."""
    is_cut: bool
    """True if older points are left out."""
    case: str
    """The case in words."""
    points: Sequence[HistoryPoint]


def history(
    database: Database,
    choice: CaseChoice,
    metric: str | None = None,
    device: str | None = None,
    limit: int = MAX_POINTS,
) -> History:
    """Return the history of a metric, named as its column, of a case: on one device or all, its newest points. Raises
    NotFound if there is no such case or job, or no finished job has measured it there, and InvalidRequest if several
    cases match, or the case has no such metric."""
    with database.read() as snapshot:
        key, coordinates = _the_case(snapshot, choice)
        known = {column_name(*pair): pair for pair in stored.metrics(snapshot, key)}
        name = metric or _main_metric(list(known), stored.kind(snapshot, key))
        if name not in known:
            raise InvalidRequest.at("/metric", f"Case {key} has no metric {name!r}; it has {', '.join(known)}.")
        rows, is_cut = stored.rows(snapshot, key, known[name], device, limit)
        jobs = stored.jobs(snapshot, list({row.job_id for row in rows}))
        rows = [row for row in rows if row.job_id in jobs and row.attempt == jobs[row.job_id].recorded]
        baselines = stored.baselines(snapshot, key, list(jobs))
        sides = measurements.sides(snapshot, list(jobs.values()))
    if not rows:
        where = f" on {device!r}" if device is not None else ""
        raise NotFound(f"No finished job has measured {name} of case {key}{where}.")
    points = _points(rows, jobs, sides, baselines, coordinates, rate=is_rate(name, rows[0].unit))
    kind = _kind(jobs[rows[-1].job_id], sides.get(rows[-1][:3]))
    return History(
        case_key=key,
        kind=kind,
        coordinates=coordinates,
        metric=name,
        unit=rows[-1].unit,
        better=better(name, rows[-1].unit),
        metrics=list(known),
        devices=sorted({point.device_key for point in points}),
        hosts=sorted({point.host for point in points if point.host is not None}),
        is_cut=is_cut or len(points) > limit,
        case=case_text(KINDS[kind].displayed(coordinates) if kind in KINDS else coordinates),
        points=points[-limit:],
    )


def cases_of_job(database: Database, job_id: int) -> dict[str, Mapping[str, Scalar]]:
    """Return the coordinates of the cases that a job measured, by key."""
    with database.read() as snapshot:
        return stored.cases_of_job(snapshot, job_id)


def _the_case(snapshot: Snapshot, choice: CaseChoice) -> tuple[str, Mapping[str, Scalar]]:
    key = choice.key or ""
    if choice.job is None:
        known = stored.cases_beginning_with(snapshot, key)
    else:
        known = stored.cases_of_job(snapshot, choice.job)
    of_key = {known_key: case for known_key, case in known.items() if known_key.startswith(key)}
    if not of_key:
        whose = f"Job {choice.job} has measured" if choice.job is not None else "There is"
        raise NotFound(f"{whose} {'no such case' if key else 'no case'}.")
    matching = dict(with_values([*of_key.items()], [*of_key.values()], choice.coordinates, "coordinate"))
    if len(matching) > 1:
        raise _ambiguous(matching, "/case" if key else "/job")
    return next(iter(matching.items()))


def _ambiguous(cases: Mapping[str, Mapping[str, Scalar]], pointer: str) -> InvalidRequest:
    differing = [
        name
        for name in dict.fromkeys(name for case in cases.values() for name in case)
        if len({repr(case.get(name)) for case in cases.values()}) > 1
    ]
    named = [
        f"{key} ({', '.join(f'{name}={value_text(case.get(name))}' for name in differing)})"
        for key, case in list(cases.items())[:MAX_NAMED]
    ]
    more = f" and {len(cases) - MAX_NAMED} more" if len(cases) > MAX_NAMED else ""
    detail = f"{len(cases)} cases match: name one by its key or by coordinates: {'; '.join(named)}{more}."
    return InvalidRequest.at(pointer, detail)


def _main_metric(known: Sequence[str], kind: str) -> str:
    """Return the main metric of a kind's table that was measured; if none of them was, the main one of all."""
    columns = KINDS[kind].table_columns if kind in KINDS else ()
    main = headline([name for name in columns if name in known]) or headline(known)
    assert main is not None, "a case has at least one measurement"
    return main


def _kind(job: HistoricJob, side: str | None) -> str:
    held = job.spec.get(side) if side is not None else None
    return str(held["kind"]) if isinstance(held, Mapping) and "kind" in held else job.kind


def _points(
    rows: Sequence[Row],
    jobs: Mapping[int, HistoricJob],
    sides: Mapping[tuple[int, int, int], str],
    baselines: Mapping[tuple[int, str], Sequence[str]],
    coordinates: Mapping[str, Scalar],
    *,
    rate: bool,
) -> list[HistoryPoint]:
    gathered: dict[tuple[int, str, str | None], list[Row]] = {}
    for row in rows:
        side = sides.get((row.job_id, row.attempt, row.unit_index))
        add_process(gathered.setdefault((row.job_id, row.device_key, side), []), row)
    points = []
    for (job_id, device, side), processes in gathered.items():
        job = jobs[job_id]
        summary = summarise(processes, planned_processes(job.spec), job.stopped, rate=rate)
        spec = job.spec if side is None else job.spec.get(side, {})
        version = version_of(spec, job.environment, coordinates)
        revision = revision_of(spec, coordinates)
        points.append(
            HistoryPoint(
                job=job_id,
                side=side,
                finished_at=rfc3339(job.finished_at),
                device_key=device,
                host=((job.environment or {}).get("host") or {}).get("hostname"),
                value=summary.value,
                low=summary.low,
                high=summary.high,
                n=summary.n,
                outcome=summary.outcome,
                validity=worst({row.validity for row in processes}),
                version=version,
                short_version=short_version(version),
                commit=revision.get("commit") or commit_of(version),
                revision=revision_text(revision),
                baselines=baselines.get((job_id, device), ()),
            )
        )
    return sorted(points, key=lambda point: (point.finished_at or "", point.job))
