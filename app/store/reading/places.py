"""Tells the places of jobs in the queue, and guesses when they start."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, literal, select

from app.store import tables
from app.store.queue.claims import CONSIDERED, QUEUED
from app.store.queue.pausing import ALL, paused_kinds
from app.store.queue.sharing import Shares, shares
from app.store.queue.waiting import stuck
from app.store.tables import utc_now

GUESSED_BY = timedelta(days=7)
"""Attempts that ended since then tell how long others will take."""

_job, _use = tables.job.c, tables.device_use.c


@dataclass(frozen=True)
class Place:
    """A queued job's place, counted from 1. `about_s`: seconds until it starts, if jobs take as long as others of their
    kind did, and paused kinds stay paused; None while no connected worker can run it, its kind is paused, or no job has
    ended yet."""

    id: int
    place: int
    about_s: float | None


def places(connection: Connection, job_ids: Collection[int]) -> dict[int, Place]:
    """Return the places of the queued ones of these jobs, by id.

    Workers consider jobs in this order: priority, the users' shares, submission. It supposes that all jobs use the mean
    device time, and that nobody submits more. Jobs that wait for other devices, or whose kind is paused, have a place
    too, and later jobs may start before them.
    """
    of_users, (mean_s, by_kind, mean_device_s) = shares(connection), _typical(connection)
    takes = {**by_kind, **dict.fromkeys(_paused(connection), 0.0)}
    takes_s: ColumnElement[Any] = case(takes, value=_job.kind, else_=mean_s) if by_kind else literal(0.0)
    use = literal(0.0) if of_users is None else _use_before(of_users, mean_device_s)
    # As in claims.py, SQLite takes the index that has the order only with a hint.
    index = "ix_job_claimable" if of_users is None else "ix_job_claimable_by_user"
    columns = (_job.id, _job.priority, takes_s.label("takes_s"), use.label("use"))
    one = select(*columns).with_hint(tables.job, f"INDEXED BY {index}", "sqlite").where(QUEUED).subquery().c
    order = [one.priority.desc(), *([] if of_users is None else [one.use]), one.id]
    place = func.row_number().over(order_by=order)
    until = func.sum(one.takes_s).over(order_by=order, rows=(None, 0))
    queue = select(one.id, place.label("place"), until.label("until_s"), one.takes_s).subquery()
    counts = (
        select(func.count()).select_from(tables.job).where(_job.state == "running", _job.device_type != "none"),
        select(func.count()).select_from(tables.worker).where(tables.worker.c.state == "active"),
    )
    running, workers = (connection.execute(count).scalar_one() for count in counts)

    def about_s(row: Any) -> float | None:
        if not by_kind or not workers or row.id in stuck_ones:
            return None
        # Of each job that runs, half is still to come.
        return float((row.until_s - row.takes_s + min(running, 1) * mean_s / 2) / max(running, 1))

    jobs = connection.execute(select(*CONSIDERED).where(_job.id.in_(job_ids), QUEUED)).mappings()
    stuck_ones = stuck(connection, jobs)
    found = connection.execute(select(queue).where(queue.c.id.in_(job_ids)))
    return {row.id: Place(row.id, row.place, about_s(row)) for row in found}


def _paused(connection: Connection) -> list[str]:
    """Return the kinds that are paused, while others are not."""
    paused = paused_kinds(connection)
    return [] if paused == ALL else paused


def _use_before(of_users: Shares, mean_device_s: float) -> ColumnElement[Any]:
    """Return what a job's user will have used when the user's earlier jobs have run."""
    used = {user: used_s for user, used_s in of_users.used_s.items() if used_s}
    whose = func.coalesce(_job.submitted_by, "")
    now: ColumnElement[Any] = case(used, value=whose, else_=0.0) if used else literal(0.0)
    earlier = func.row_number().over(partition_by=_job.submitted_by, order_by=(_job.priority.desc(), _job.id)) - 1
    return now + earlier * literal(mean_device_s or 1.0)


def _typical(connection: Connection) -> tuple[float, dict[str, float], float]:
    """Return the mean seconds of an attempt, those of each kind, and the mean device seconds; 0 without attempts."""
    query = select(_use.kind, _use.attempts, _use.ran_s, _use.device_s).where(_use.hour >= utc_now() - GUESSED_BY)
    sums: dict[str, tuple[int, float]] = {}
    attempts, device_s = 0, 0.0
    for row in connection.execute(query):
        number, ran_s = sums.get(row.kind, (0, 0.0))
        sums[row.kind] = (number + row.attempts, ran_s + row.ran_s)
        attempts, device_s = attempts + row.attempts, device_s + row.device_s
    by_kind = {kind: ran_s / number for kind, (number, ran_s) in sums.items()}
    return sum(ran_s for _, ran_s in sums.values()) / max(attempts, 1), by_kind, device_s / max(attempts, 1)
