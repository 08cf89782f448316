"""Searches of sweeps for the largest value that fits: what was tried, and which job comes next.

A search has no state of its own: it follows from the jobs of the sweep and their outcomes. The next job is submitted in
the same transaction in which the one before succeeds. So a search survives the death of any process, and there is no
moment in which all its jobs have ended but the search has not.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from sqlalchemy import Connection, select

from app.errors import Conflict
from app.specs import spec_adapter
from app.specs._fit import Fit
from app.specs._sweep import Point, expand, member_name
from app.states import JobState
from app.store import tables
from app.store.queue import submission, sweeps
from app.store.records import NewJob
from app.store.tables import utc_now

logger = logging.getLogger(__name__)

_job, _measurement = tables.job.c, tables.measurement.c

FITS, TOO_LARGE, UNKNOWN = "fits", "oom", "unknown"
DOUBTS = ("updates", "growth", "gradients")
"""Checks that fail where more memory may be needed than what was measured."""


@dataclass(frozen=True)
class TriedValue:
    """One value of a search. `outcome` is None as long as its job has not ended."""

    value: int
    job: int
    state: JobState
    outcome: str | None


def fit_of(sweep: Mapping[Any, Any]) -> Fit | None:
    """Return the search of a row of the table `sweep`; None for a plain grid."""
    return Fit(**sweep["fit"]) if sweep["fit"] else None


def points_of(sweep: Mapping[Any, Any]) -> list[Point]:
    """Return the points of a sweep's grid; without a grid, the base alone."""
    if not sweep["grid"]:
        return [Point(sweep["base"], {})]
    return expand(sweep["base"], sweep["grid"], sweep["exclude"])


def searches(connection: Connection, sweep: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """Return the public searches of a sweep, one for each point of its grid; None for a plain grid."""
    fit = fit_of(sweep)
    if fit is None:
        return None
    tried = _tried(connection, sweep["id"], fit)
    found = [_public(sweep, fit, point, tried.get(sweeps.point_key(point.choice), [])) for point in points_of(sweep)]
    doubts = _doubts(connection, [search["largest_job"] for search in found])
    for search in found:
        if (doubt := doubts.get(search["largest_job"])) is not None:
            search["reason"] = f"{search['reason']} {doubt}" if search["reason"] else doubt
    return found


def submit_next(connection: Connection, job: Mapping[Any, Any]) -> None:
    """Submit the job that follows `job`, a row of the table `job` that has just succeeded, if it is a search's."""
    is_search = (tables.sweep.c.id == job["sweep_id"]) & tables.sweep.c.fit.is_not(None)
    sweep = connection.execute(select(tables.sweep).where(is_search)).mappings().one_or_none()
    fit = None if sweep is None else fit_of(sweep)
    if sweep is None or fit is None or not job["point"]:
        return
    choice = {path: index for path, index in job["point"].items() if path != fit.axis}
    point = next((point for point in points_of(sweep) if point.choice == choice), None)
    if point is None:
        return
    problem = _submit_next_job(connection, sweep, fit, point, _tried(connection, sweep["id"], fit))[1]
    if problem is not None:
        # This is not the fault of the job that has just ended, so its results are kept. The search's status says why.
        logger.warning("sweep %s: %s", sweep["id"], problem)


def resume(connection: Connection, sweep: Mapping[Any, Any]) -> tuple[int, str | None]:
    """Submit the next job of each unfinished search without a queued or running job.

    Returns how many jobs it submitted, and why the first search that could not continue did not; None if all could.
    """
    fit = fit_of(sweep)
    if fit is None:
        return 0, None
    tried = _tried(connection, sweep["id"], fit)
    done = [_submit_next_job(connection, sweep, fit, point, tried) for point in points_of(sweep)]
    return sum(is_new for is_new, _ in done), next((problem for _, problem in done if problem), None)


def new_job(sweep: Mapping[Any, Any], fit: Fit, point: Point, value: int) -> NewJob:
    """Make the job that tries a value. Raises ValidationError if the spec takes no such value."""
    spec = spec_adapter.validate_json(to_json(fit.spec(point.spec, value)))
    at = {**point.choice, fit.axis: value}
    name = member_name(sweep["name"], sweep["grid"], at)
    return NewJob(spec, name=name, labels=sweep["labels"], **sweep["options"], point=at)


def _submit_next_job(
    connection: Connection,
    sweep: Mapping[Any, Any],
    fit: Fit,
    point: Point,
    tried: Mapping[frozenset[tuple[str, int]], Sequence[TriedValue]],
) -> tuple[bool, str | None]:
    """Submit a search's next job; returns whether it did, and the reason if it could not."""
    trials = tried.get(sweeps.point_key(point.choice), ())
    if any(trial.outcome not in (FITS, TOO_LARGE) for trial in trials):  # a job waits or runs, or has left it open
        return False, None
    value = fit.next_value(*_fitting_and_too_large(trials))
    if value is None:
        return False, None
    try:
        # A job whose code is gone leaves nothing behind: what is around the savepoint is kept.
        with connection.begin_nested():
            job = new_job(sweep, fit, point, value)
            submission.insert_jobs(connection, [submission.job_row(job, sweep["id"], utc_now())])
    except ValidationError as invalid:
        return False, _not_valid(fit, value, invalid)
    except Conflict as gone:
        return False, f"{fit.axis} {value} has no job: {gone.detail}"
    return True, None


def _fitting_and_too_large(tried: Sequence[TriedValue]) -> tuple[list[int], list[int]]:
    return tuple([trial.value for trial in tried if trial.outcome == outcome] for outcome in (FITS, TOO_LARGE))  # type: ignore[return-value]


def _largest(fitted: Sequence[int], too_large: Sequence[int]) -> int | None:
    """Return the largest value that fitted below all that did not."""
    return max((value for value in fitted if not too_large or value < min(too_large)), default=None)


def _tried(connection: Connection, sweep_id: int, fit: Fit) -> dict[frozenset[tuple[str, int]], list[TriedValue]]:
    """Return the values that were tried, in order, by the key of their search's point (sweeps.point_key)."""
    query = select(_job.id, _job.state, _job.point, _job.attempt).where(_job.id.in_(sweeps.latest_jobs([sweep_id])))
    jobs = connection.execute(query.order_by(_job.id)).all()
    outcomes: dict[tuple[int, int], set[str]] = {}
    distinct = select(_measurement.job_id, _measurement.attempt, _measurement.outcome).distinct()
    for job_id, attempt, outcome in connection.execute(
        distinct.where(_measurement.job_id.in_([job.id for job in jobs]))
    ):
        outcomes.setdefault((job_id, attempt), set()).add(outcome)
    tried: dict[frozenset[tuple[str, int]], list[TriedValue]] = {}
    for job in jobs:
        if not isinstance(job.point, dict) or fit.axis not in job.point:
            continue
        key = sweeps.point_key({path: index for path, index in job.point.items() if path != fit.axis})
        outcome = _outcome(job.state, outcomes.get((job.id, job.attempt), set()))
        tried.setdefault(key, []).append(TriedValue(job.point[fit.axis], job.id, job.state, outcome))
    return tried


def _outcome(state: str, outcomes: set[str]) -> str | None:
    """Return what a job says about its value. Metrics that are unknown for good reasons do not count."""
    if state in ("queued", "running"):
        return None
    if state != "succeeded":
        return UNKNOWN
    if "oom" in outcomes:
        return TOO_LARGE
    return FITS if outcomes - {"unknown"} == {"ok"} else UNKNOWN


def _doubts(connection: Connection, jobs: Sequence[int | None]) -> dict[int | None, str]:
    """Return why it is not certain that what these jobs tried fits."""
    doubts: dict[int | None, str] = {}
    for job, validity in connection.execute(select(_job.id, _job.validity).where(_job.id.in_(filter(None, jobs)))):
        checks = [check for check in (validity or {}).get("checks", ()) if not check["ok"]]
        failed = [one for one in checks if one["name"] in DOUBTS or one.get("severity") in ("invalid", "wrong")]
        if failed:
            said = "; ".join(dict.fromkeys(one["detail"] for one in failed))  # replicates say the same
            doubts[job] = f"Job {job} may need more memory than it measured: {said}."
    return doubts


def _public(sweep: Mapping[Any, Any], fit: Fit, point: Point, tried: Sequence[TriedValue]) -> dict[str, Any]:
    fitted, too_large = _fitting_and_too_large(tried)
    first_too_large, largest = min(too_large, default=None), _largest(fitted, too_large)
    jobs = {trial.value: trial.job for trial in tried}
    status = _status(sweep, fit, point, tried)
    return {
        "point": {path: sweep["grid"][path][index] for path, index in point.choice.items()},
        "axis": fit.axis,
        **vars(status),
        "largest": largest,
        "largest_job": jobs.get(largest) if largest is not None else None,
        "too_large": first_too_large,
        "too_large_job": jobs.get(first_too_large) if first_too_large is not None else None,
        "tried": tried,
    }


@dataclass(frozen=True)
class _Status:
    """The status of a search: its state (searching, done or stopped), the reason, and whether resuming continues
    it."""

    state: str
    reason: str | None = None
    resumable: bool = False


def _status(sweep: Mapping[Any, Any], fit: Fit, point: Point, tried: Sequence[TriedValue]) -> _Status:
    fitted, too_large = _fitting_and_too_large(tried)
    if any(trial.outcome is None for trial in tried):
        return _Status("searching")
    undecided = [trial for trial in tried if trial.outcome == UNKNOWN]
    if undecided:
        return _undecided(fit, next((trial for trial in undecided if trial.state == "succeeded"), undecided[-1]))
    value = fit.next_value(fitted, too_large)
    if value is not None:
        return _without_job(sweep, fit, point, value)
    if not too_large:
        return _Status("done", f"Every value up to {fit.upto} that was tried fits.")
    if not fitted:
        job = min(tried, key=lambda trial: trial.value).job
        return _Status("done", f"Not even the smallest value, {fit.lowest}, fits: job {job} says what it lacks.")
    known = []
    if max(fitted) > min(too_large):
        known.append(
            f"{max(fitted)} fitted, too, although {min(too_large)} did not: memory does not grow with the value."
        )
    largest = _largest(fitted, too_large)
    if largest is not None and min(too_large) - largest > fit.step:
        known.append("Sought to 6 %; with `step` 1 (`--multiple-of 1`) it is exact.")
    return _Status("done", " ".join(known) or None)


def _undecided(fit: Fit, trial: TriedValue) -> _Status:
    which = f"Job {trial.job} ({fit.axis} {trial.value})"
    if trial.state == "succeeded":
        # Resuming repeats only what has failed or was cancelled.
        return _Status(
            "stopped",
            f"{which} succeeded, but its results do not tell whether the value fits: see why. To try it once more, "
            "delete that job and resume the sweep.",
        )
    how = "has failed" if trial.state == "failed" else "was cancelled"
    return _Status("stopped", f"{which} {how}: see why, and resume the sweep.", resumable=True)


def _without_job(sweep: Mapping[Any, Any], fit: Fit, point: Point, value: int) -> _Status:
    """Return the status of a search whose next value no job tries."""
    try:
        new_job(sweep, fit, point, value)
    except ValidationError as invalid:
        return _Status("stopped", f"{_not_valid(fit, value, invalid)} Submit another sweep for that.")
    return _Status("stopped", f"{fit.axis} {value} has no job. Resume the sweep to go on.", resumable=True)


def _not_valid(fit: Fit, value: int, invalid: ValidationError) -> str:
    problems = "; ".join(error["msg"] for error in invalid.errors(include_url=False))
    return f"{fit.axis} {value} is not valid, and a coarser step may help: {problems}."
