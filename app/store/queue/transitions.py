"""The queue: the state machine of jobs, with every transaction that moves one.

    submit ─→ queued ─ claim ─→ running ─ finish ─→ succeeded | failed | cancelled
               ↑ ↑ │               │                               │        │
               │ │ └─ cancel ──────┼─→ cancelled                   │        │
               │ └── give_back; give_up, recover (worker failed or lost,    │
               │                                  attempts left)            │
               └──────────────────────────── retry ────────────────┴────────┘

A job that waits in a cluster's queue is claimed and still `queued`, with a `waiting_reason`, until the agent in its
allocation takes it over. Nobody else claims it, and as long as it has not begun its attempt costs nothing.

A claim carries (job, attempt, token). Every transaction in which a worker writes about a claim first passes the fence
(fence.py): a worker that has lost the attempt gets LeaseLost, and the transaction leaves nothing behind.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, exists, func, insert, literal_column, select, update

from app.errors import Conflict, LeaseLost, job_problem
from app.logs import about
from app.specs._fit import Fit
from app.specs._schema import SCHEMA, name_of
from app.specs._sweep import expand, member_name
from app.states import FINISHED_STATES, LivingState
from app.store import service_settings, tables, tokens
from app.store.column_types import broken
from app.store.database.engine import Database
from app.store.public import NO_PROGRESS, job_dict, row_of, sweep_dict
from app.store.queue import ends, fence, fitting, sharing, staging, submission, sweeps, tallies, webhooks
from app.store.queue.claims import UNCLAIMED, next_job
from app.store.queue.pausing import pause_reason, paused_kinds
from app.store.queue.registration import beat, server
from app.store.queue.waiting import waiting_reasons
from app.store.records import (
    Claim,
    Finish,
    HandedOver,
    Idempotency,
    NewEvent,
    NewJob,
    Offer,
    Renewal,
    RunningAttempt,
    Submitted,
)
from app.store.tables import utc_now
from app.summaries import planned_processes, values_of_job

_job, _attempt, _sweep = tables.job.c, tables.attempt.c, tables.sweep.c

_OF_JOB = ("kind", "name", "spec", "timeout_s", "device_type", "devices", "exclusive_host", "sweep_id", "submitted_by")
"""Columns of the table `job` that a claim carries."""
_MARK_CLAIMED = (
    update(tables.job)
    .where(_job.id == bindparam("job_id"), UNCLAIMED)
    .values(
        state=bindparam("new_state"),
        attempt=_job.attempt + 1,
        worker_id=bindparam("by"),
        started_at=bindparam("starts_at"),
        waiting_reason=bindparam("waits_for"),
        version=_job.version + 1,
    )
    .returning(*(_job[name] for name in ("attempt", "created_at", "requirements", *_OF_JOB)))
)
_BEGIN_ATTEMPT = insert(tables.attempt).returning(_attempt.id)
_END_ATTEMPT = update(tables.attempt).where(_attempt.id == bindparam("attempt_id"))
_CHANGE_JOB = update(tables.job).where(_job.id == bindparam("job_id")).values(version=_job.version + 1)
_RAN = select(_job.kind, _job.started_at, _job.finished_at).where(_job.id == bindparam("job_id"))
_EVENT = insert(tables.event)
_LOSE_ATTEMPT = (
    update(tables.attempt)
    .where(_attempt.id == bindparam("attempt_id"), _attempt.state == "running", _attempt.beat == bindparam("seen_beat"))
    .values(state="lost")
    .returning(_attempt.worker_id, _attempt.error)
)
# The running jobs of a lost worker, except those that have the host for themselves.
_LOST_WITH = (
    select(_attempt.id, _attempt.job_id)
    .join_from(tables.attempt, tables.job, _attempt.job_id == _job.id)
    .join(tables.worker, _attempt.worker_id == tables.worker.c.id)
    .where(
        _attempt.state == literal_column("'running'"),
        _attempt.worker_id == bindparam("of_worker"),
        tables.worker.c.state == "lost",
        _job.state == "running",
        _job.exclusive_host.is_(False),
    )
)
_earlier = tables.attempt.alias("earlier").c
_EXCUSE = update(tables.job).values(
    max_attempts=_job.max_attempts + 1,
    exclusive_host=exists().where(_earlier.job_id == _job.id, _earlier.state == "lost", _earlier.number < _job.attempt),
)
_RUNNING = (
    select(_attempt.id, _attempt.job_id, _attempt.number, _attempt.beat)
    .where(_attempt.state == literal_column("'running'"))  # a literal, as in claims.py
    .order_by(_attempt.id)
)


logger = logging.getLogger(__name__)

RETRIED_STATES = ("failed", "cancelled")
"""States from which `retry` queues a job again."""
SILENT = "The worker fell silent for longer than its lease."
LOST_TOGETHER = (
    SILENT[:-1] + " while it ran the jobs {}. One of them may have ended it: the attempt does not count, and a job "
    "that loses a second worker runs alone next."
)
CANCELLED_BEFORE = "The job was cancelled before it ran."
CANCELLED_WHILE = "The job was cancelled while it ran."
CANCELLED_PENDING = "The job was cancelled while it waited in the cluster's queue; it had not begun."
CANCELLED_AND_LOST = "The job was cancelled while it ran; its worker was lost."


class Queue:
    """The queue of one database. Each state change of a job is one transaction, with everything that others see of it.

    `finish` and `give_back` write or delete staged results in further transactions before it (see staging.py). `claim`
    and `resume_sweep` read before it, in a transaction of their own.
    """

    def __init__(
        self, database: Database, *, max_queued: int | None = None, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """`max_queued`: most queued jobs of one submitter; `pause` waits for so many seconds between two slices."""
        self._database = database
        self._max_queued = max_queued
        self._pause = pause

    def submit(self, new: NewJob, idempotency: Idempotency | None = None) -> Submitted:
        """Queue one job. A repeated Idempotency-Key gets the first answer; another body raises IdempotencyMismatch.

        Raises KeyTaken when another job with its unique key is queued or running, and QueueFull.
        """
        with self._database.write() as connection:

            def answer() -> dict[str, Any]:
                submission.check_room(connection, new.submitted_by, self._max_queued, 1)
                submission.check_key(connection, new.unique_key)
                (row,) = submission.insert_jobs(connection, [submission.job_row(new, None, utc_now())])
                webhooks.register(connection, new.notify_url, job_id=row["id"])
                return job_dict(row, waiting_reasons(connection, [row]).get(row["id"]))

            return submission.answer_once(connection, idempotency, answer)

    def submit_sweep(
        self,
        name: str | None,
        labels: dict[str, str],
        base: dict[str, Any],
        grid: dict[str, Any],
        exclude: list[Any],
        jobs: Sequence[NewJob],
        idempotency: Idempotency | None = None,
        fit: Fit | None = None,
        notify_url: str | None = None,
    ) -> Submitted:
        """Queue a sweep and all of its jobs, which have the same options, or nothing. With `fit`, they are the first of
        each search. Each job's name is the sweep's, followed by the coordinates that distinguish the job. Raises
        QueueFull, and ValueError when there is no job."""
        if not jobs:
            raise ValueError("a sweep has at least one job")
        now = utc_now()
        # Rows are made before the transaction, because that takes long for thousands of jobs.
        named = [replace(new, name=member_name(name, grid, new.point or {})) for new in jobs]
        rows = self._bound([submission.job_row(new, None, now) for new in named])
        with self._database.write() as connection:

            def answer() -> dict[str, Any]:
                submission.check_room(connection, jobs[0].submitted_by, self._max_queued, len(jobs))
                row = {
                    "name": name,
                    "labels": labels,
                    "base": base,
                    "grid": grid,
                    "exclude": exclude,
                    "options": jobs[0].options,
                    "fit": None if fit is None else fit.as_json(),
                    "created_at": now,
                }
                sweep_id = connection.execute(insert(tables.sweep).returning(_sweep.id), row).scalar_one()
                last = sweeps.last_job(connection)
                connection.execute(submission.INSERT_BOUND, [{**of_job, "sweep_id": sweep_id} for of_job in rows])
                sweeps.complete(connection, sweep_id, jobs[0].labels, last, now)
                webhooks.register(connection, notify_url, sweep_id=sweep_id)
                return sweep_dict({"id": sweep_id, **row}, {"queued": len(jobs)})

            return submission.answer_once(connection, idempotency, answer)

    def check_room(self, jobs: Sequence[NewJob]) -> None:
        """Raise QueueFull if these jobs of one submitter would be refused now, and KeyTaken."""
        with self._database.read() as connection:
            submission.check_room(connection, jobs[0].submitted_by, self._max_queued, len(jobs))
            for unique_key in {job.unique_key for job in jobs}:
                submission.check_key(connection, unique_key)

    def first_answer(self, idempotency: Idempotency | None) -> Submitted | None:
        """Return the answer that a request with this key got before, so that it is not validated again; None when the
        key is new, or there is none. Raises IdempotencyMismatch for another body, and Gone if what that request made
        was deleted."""
        if idempotency is None:
            return None
        with self._database.read() as connection:
            return submission.first_answer(connection, idempotency)

    def keep_awaited_answer(self, idempotency: Idempotency, response: dict[str, Any]) -> dict[str, Any]:
        """Keep the answer to a request that waited for its job's end; returns the first such answer."""
        with self._database.write() as connection:
            return submission.keep_awaited(connection, idempotency, response)

    def resume_sweep(self, sweep_id: int) -> dict[str, Any]:
        """Queue a new job for each point whose latest one failed or was cancelled, or that has no job any more.

        Returns the public sweep. Raises NotFound; Conflict when there is no such point, or when a point without a job
        has a spec that this version does not take; QueueFull.
        """
        with self._database.read() as connection:
            sweep = row_of(connection, tables.sweep, sweep_id)._asdict()
            if problem := broken(sweep):
                raise Conflict(f"Sweep {sweep_id} cannot be resumed. {problem['detail']}")
            # The points of a search follow from its outcomes.
            points = expand(sweep["base"], sweep["grid"], sweep["exclude"]) if sweep["fit"] is None else []
            lacking = sweeps.points_without_jobs(connection, sweep_id, points)
        # Rows are made before the transaction, because that takes long for thousands of jobs.
        now = utc_now()
        made = self._bound([submission.job_row(sweeps.job_of_point(sweep, point), sweep_id, now) for point in lacking])
        with self._database.write() as connection:
            still = {
                sweeps.point_key(point.choice) for point in sweeps.points_without_jobs(connection, sweep_id, lacking)
            }
            rows = [row for row, point in zip(made, lacking, strict=True) if sweeps.point_key(point.choice) in still]
            last = sweeps.last_job(connection)
            number = sweeps.repeat_unsuccessful(connection, sweep, now) + len(rows)
            if rows:
                connection.execute(submission.INSERT_BOUND, rows)
            sweeps.complete(connection, sweep_id, sweep["labels"], last, now)
            searches, obstacle = fitting.resume(connection, sweep)
            number += searches
            if number == 0 and obstacle is not None:
                raise Conflict(f"Sweep {sweep_id} cannot be resumed. {obstacle}")
            if number == 0:
                raise Conflict(
                    f"Every point of sweep {sweep_id} has a result, or a job on its way: there is nothing to resume."
                )
            submitter = sweep["options"].get("submitted_by")
            submission.check_room(connection, submitter, self._max_queued, number, stored=number)
            webhooks.expect_again(connection, sweep_id=sweep_id)
            return sweep_dict(sweep, sweeps.counts(connection, [sweep_id])[sweep_id])

    def _bound(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return submission.bound(self._database.backend.engine.dialect, rows)

    def cancel_sweep(self, sweep_id: int) -> dict[str, Any]:
        """Cancel every job of a sweep that is not finished, as `cancel` does; returns the public sweep.

        A second call returns the same. Raises NotFound.
        """
        with ends.logging_ends(self._database) as connection:
            sweep = row_of(connection, tables.sweep, sweep_id)._asdict()
            _cancel_jobs(connection, _job.sweep_id == sweep_id)
            return sweep_dict(sweep, sweeps.counts(connection, [sweep_id]).get(sweep_id, {}))

    def claim(self, worker_id: str, offer: Offer, waits_for: str | None = None) -> Claim | None:
        """Take the job that the worker must run next and count the attempt; None when the worker can start none now.

        waits_for: what the job waits for elsewhere before it runs; it stays queued until `take_over`.
        """
        with self._database.read() as connection:  # an idle worker takes no write lock
            if next_job(connection, worker_id, offer) is None:
                return None
        with ends.logging_ends(self._database) as connection:
            while (job_id := next_job(connection, worker_id, offer)) is not None:
                claim = _start_attempt(connection, job_id, worker_id, waits_for)
                if claim is not None:
                    return claim
        return None

    def take_over(self, handed: HandedOver, new_token: str, worker_id: str) -> Claim:
        """Take a claim over from the worker that handed it over: from now on only the returned claim's token counts.

        The job starts now: it has only waited until here. A call whose answer was lost can be repeated with the same
        new token. Raises LeaseLost if the attempt is over, or was taken over with another one, or if the job's kind is
        paused: then it goes back.
        """
        with self._database.write() as connection:
            now = utc_now()
            tokens = (handed.token, new_token)
            attempt_id = fence.take_over(connection, handed.job_id, handed.attempt, tokens, worker_id)
            connection.execute(_END_ATTEMPT.values(started_at=now), {"attempt_id": attempt_id})
            job = row_of(connection, tables.job, handed.job_id)
            if job.state not in ("queued", "running"):  # a server of 0.1.0 ends a queued job, and not its attempt
                raise LeaseLost(f"Job {handed.job_id} is {job.state}.")
            paused = pause_reason(job.kind, paused_kinds(connection)) if job.state == "queued" else None
            if paused is not None:
                _end_attempt(connection, attempt_id, "given_back")
                _requeue(connection, handed.job_id, handed.attempt, "given_back", counted=False)
            else:
                if job.state == "queued":
                    _observe_waiting(connection, job, now)
                began = {"state": "running", "waiting_reason": None, "worker_id": worker_id, "started_at": now}
                _change_job(connection, handed.job_id, **began)
                _record_event(
                    connection, handed.job_id, handed.attempt, "state", {"state": "running", "worker_id": worker_id}
                )
        if paused is not None:
            raise LeaseLost(f"Job {handed.job_id} went back: {paused}.")
        return Claim(
            job_id=handed.job_id,
            attempt=handed.attempt,
            token=new_token,
            attempt_id=attempt_id,
            worker_id=worker_id,
            **{name: getattr(job, name) for name in _OF_JOB},
        )

    def waits(self, claim: Claim, reason: str) -> None:
        """Say what a claimed job that has not begun waits for now. Raises LeaseLost."""
        with self._database.write() as connection:
            fence.check(connection, claim)
            _change_job(connection, claim.job_id, waiting_reason=reason)
            said = {"state": "queued", "reason": "pending", "waiting": reason}
            _record_event(connection, claim.job_id, claim.attempt, "state", said)

    def renew(
        self,
        claims: Sequence[Claim],
        worker: tuple[str, LivingState] | None = None,
        readings: dict[str, Any] | None = None,
        unfit: dict[str, Any] | None = None,
    ) -> Renewal:
        """Send one heartbeat of each claim, and with them that of the `worker`, by its id, with its state.

        `readings` are what the worker's devices do now; None keeps the last ones. `unfit`: why the worker is unfit.

        They are one transaction: a worker that is seen alive has renewed its claims. Returns the attempts that were
        lost, and the jobs of the others that must be cancelled.
        """
        if not claims and worker is None:
            return Renewal(frozenset(), frozenset())
        with self._database.write() as connection:
            knows_worker = worker is None or beat(connection, *worker, readings, unfit)
            held = {claim.attempt_id: claim.job_id for claim in claims if fence.renew(connection, claim)}
            to_cancel = select(_job.id).where(_job.id.in_(held.values()), _job.cancel_requested_at.is_not(None))
            cancel_requested = frozenset(connection.execute(to_cancel).scalars())
            newest = server(connection)
        lost = frozenset(claim.attempt_id for claim in claims if claim.attempt_id not in held)
        return Renewal(lost, cancel_requested, knows_worker, newest)

    def cancel_requested(self, job_ids: Sequence[int]) -> frozenset[int]:
        """Return those of these claimed jobs whose cancellation was requested. `renew` returns them too, but less
        often; not those that had not begun, which are cancelled at once."""
        to_cancel = select(_job.id).where(
            _job.id.in_(job_ids), _job.state.in_(("running", "cancelled")), _job.cancel_requested_at.is_not(None)
        )
        with self._database.read() as connection:
            return frozenset(connection.execute(to_cancel).scalars())

    def report(self, claim: Claim, events: Sequence[NewEvent]) -> None:
        """Record what happened in a running attempt; a `progress` event is also the job's progress."""
        with self._database.write() as connection:
            fence.check(connection, claim)
            now = utc_now()
            rows = [
                {
                    "job_id": claim.job_id,
                    "attempt": claim.attempt,
                    "type": event.type,
                    "data": event.data,
                    "created_at": now,
                }
                for event in events
            ]
            if rows:
                connection.execute(_EVENT, rows)
            progress = next((event.data for event in reversed(events) if event.type == "progress"), None)
            if progress is not None:
                _change_job(connection, claim.job_id, progress={name: progress[name] for name in NO_PROGRESS})

    def finish(self, claim: Claim, finish: Finish) -> str:
        """End an attempt with state, units, measurements, tables, artifacts and log, together; or raise LeaseLost.

        Large results are written in slices first, which nobody sees before the one short transaction that ends the
        attempt (see staging.py). Returns the state that the job ended in: a requested cancel wins over any other. A job
        that does not succeed keeps its measurements, marked partial. The artifacts' files must be stored and held (see
        artifacts.py).

        If the answer to an earlier call's commit was lost on its way, a second call returns what the first would have.
        """
        try:
            return self._finish(claim, finish)
        except LeaseLost:
            # Only who has the token ends an attempt like this.
            with self._database.read() as connection:
                state = fence.state_of(connection, claim)
            if state not in FINISHED_STATES:
                raise
            return state

    def _finish(self, claim: Claim, finish: Finish) -> str:
        # A cancel that arrives while results are written makes them partial: then they are written again.
        for partial in (finish.state != "succeeded", True):
            is_staged, last = self._stage(claim, staging.slices(claim, finish, partial=partial))
            state = self._end_with(claim, finish, last, partial if is_staged else None)
            if state is not None:
                return state
        raise AssertionError("a cancel is never taken back")

    def _stage(self, claim: Claim, slices: Iterator[staging.Slice]) -> tuple[bool, staging.Slice]:
        """Write all slices but the last, each in its own transaction. Returns whether there were any, and the last."""
        self._clear(claim)
        is_staged, last = False, next(slices)
        for following in slices:
            with self._database.write() as connection:
                fence.check(connection, claim)
                if not is_staged:
                    staging.mark(connection, claim.attempt_id, is_staged=True)
                staging.write(connection, last)
            is_staged, last = True, following
            self._pause(staging.PAUSE_S)
        return is_staged, last

    def _clear(self, claim: Claim) -> None:
        """Delete the rows that an earlier try of the same attempt has staged."""
        with self._database.read() as connection:
            is_left = staging.is_marked(connection, claim.attempt_id)
        while is_left:
            with self._database.write() as connection:
                fence.check(connection, claim)
                is_left = staging.unstage(connection, claim.attempt_id, claim.job_id, claim.attempt)
            self._pause(staging.PAUSE_S)

    def _end_with(self, claim: Claim, finish: Finish, last: staging.Slice, staged_as: bool | None) -> str | None:
        """End an attempt with its last slice; returns the job's state, or None when staged rows are marked wrongly.
        `staged_as`: what staged rows say about being partial; None when there are none."""
        values = _values(claim, finish, finish.state)
        with ends.logging_ends(self._database) as connection:
            fence.check(connection, claim)
            job = row_of(connection, tables.job, claim.job_id)
            state = "cancelled" if job.cancel_requested_at is not None else finish.state
            partial = state != "succeeded"
            if staged_as not in (None, partial):
                return None
            error = finish.error
            if state == "cancelled" and (error is None or error.get("code") != "cancelled"):
                error = job_problem("cancelled", CANCELLED_WHILE)
            staging.write(connection, _with_partial(last, partial=partial))
            _end_attempt(connection, claim.attempt_id, state, error=error, log=finish.log, staged=False)
            _finish_job(
                connection,
                claim.job_id,
                claim.attempt,
                state,
                error,
                environment=finish.environment,
                validity=finish.validity,
                metrics=values if state == finish.state else _values(claim, finish, state),
            )
            if state == "succeeded" and job.sweep_id is not None:
                fitting.submit_next(connection, job._mapping)
        return state

    def delete_abandoned_results(self, slices: int = 10) -> int:
        """Delete staged results of attempts that ended without them, at most `slices` slices, and return their number.
        More are left to the next call: nobody sees these rows, and others want to write."""
        for done in range(slices):
            with self._database.read() as connection:  # nearly always there are none
                if staging.leftover(connection) is None:
                    return done
            with self._database.write() as connection:
                attempt = staging.leftover(connection)
                if attempt is not None:
                    staging.unstage(connection, *attempt)
            self._pause(staging.PAUSE_S)
        return slices

    def give_back(self, claim: Claim) -> None:
        """Put a running job back into the queue without counting the attempt. A requested cancel wins.

        Only a worker that shuts down, or is unfit for any job, may do so: see `give_up`. The next attempt has the same
        number, so what this one has staged is deleted first.
        """
        self._clear(claim)
        with ends.logging_ends(self._database) as connection:
            fence.check(connection, claim)
            job = row_of(connection, tables.job, claim.job_id)
            if job.cancel_requested_at is not None:
                error = job_problem("cancelled", CANCELLED_WHILE)
                _end_attempt(connection, claim.attempt_id, "cancelled", error=error)
                _finish_job(connection, claim.job_id, claim.attempt, "cancelled", error, metrics=None)
            else:
                _end_attempt(connection, claim.attempt_id, "given_back")
                _requeue(connection, claim.job_id, claim.attempt, "given_back", counted=False)

    def give_up(self, claim: Claim, reason: str) -> str:
        """End an attempt that an error of its worker made impossible, which counts as if the worker had been lost.
        Returns the job's new state: queued again, failed as `worker_lost` when no attempts are left, or cancelled."""
        with ends.logging_ends(self._database) as connection:
            fence.check(connection, claim)
            error = job_problem("worker_lost", f"The worker could not go on with the job: {reason}.")
            _end_attempt(connection, claim.attempt_id, "lost", error=error)
            return _requeue_or_fail(connection, claim.job_id, claim.attempt, error, CANCELLED_WHILE)

    def cancel(self, job_id: int) -> dict[str, Any]:
        """Cancel a job: at once when it is queued, else its worker is asked to end it; returns the public job.

        A second call returns the same. Raises NotFound, or Conflict when the job has succeeded or failed.
        """
        with ends.logging_ends(self._database) as connection:
            job = row_of(connection, tables.job, job_id)
            if job.state in ("succeeded", "failed"):
                raise Conflict(f"Job {job_id} has {job.state}: there is nothing to cancel.")
            _cancel_jobs(connection, _job.id == job_id)
            return job_dict(row_of(connection, tables.job, job_id)._mapping, waiting=None)

    def cancel_some(self, job_ids: Sequence[int]) -> tuple[int, int]:
        """Cancel those of these jobs that are not finished; returns how many of them were queued, and so are cancelled,
        and how many were running, and are asked to end for the first time."""
        some = _job.id.in_(job_ids)
        running = (_job.state == "running") & _job.cancel_requested_at.is_(None)
        with ends.logging_ends(self._database) as connection:
            queued, cancelling = (
                connection.execute(select(func.count()).select_from(tables.job).where(some, those)).scalar_one()
                for those in (_job.state == "queued", running)
            )
            _cancel_jobs(connection, some)
        return queued, cancelling

    def retry(self, job_id: int) -> dict[str, Any]:
        """Queue a job that failed or was cancelled once more; returns the public job.

        Its next attempt is allowed even if it has used up all attempts. Results of earlier attempts stay. Raises
        NotFound; Conflict when the job is in another state, when somebody is deleting it, or when its sweep was resumed
        and has a newer job instead of it; KeyTaken when another job with its unique key is queued or running;
        QueueFull.
        """
        with self._database.write() as connection:
            job = row_of(connection, tables.job, job_id)
            if job.state not in RETRIED_STATES:
                how = "has succeeded" if job.state == "succeeded" else f"is {job.state}"
                raise Conflict(
                    f"Job {job_id} {how}: only a job that failed or was cancelled can be retried"
                    + ("; submit its spec as a new job." if job.state == "succeeded" else ".")
                )
            if job.deleting:
                raise Conflict(f"Job {job_id} is being deleted: submit it as a new job.")
            later = sweeps.newer_job_of_point(connection, job_id, job.sweep_id)
            if later is not None:
                raise Conflict(
                    f"Sweep {job.sweep_id} was resumed, and job {later} stands in the place of job {job_id}."
                )
            submission.check_room(connection, job.submitted_by, self._max_queued, 1)
            submission.check_key(connection, job.unique_key)
            allowed = max(job.max_attempts, job.attempt + 1)
            _change_job(connection, job_id, max_attempts=allowed, **submission.INITIAL_COLUMNS)
            _record_event(connection, job_id, job.attempt, "state", {"state": "queued", "reason": "retried"})
            webhooks.expect_again(connection, job_id=job_id, sweep_id=job.sweep_id)
            queued = row_of(connection, tables.job, job_id)._mapping
            return job_dict(queued, waiting_reasons(connection, [queued]).get(job_id))

    def probe(self) -> None:
        """Commit something that changes no data. Raises the errors of a write if that is impossible."""
        self._database.probe()

    def server(self) -> dict[str, Any] | None:
        """Return what the server is that started last (see registration.py)."""
        with self._database.read() as connection:
            return server(connection)

    def has_several_users(self) -> bool:
        """Return True if tokens of several names are in use: then nobody's jobs may speak for all."""
        with self._database.read() as connection:
            return tokens.number_of_names(connection) > 1

    def lease_s(self) -> float | None:
        """Return the lease that processes of this database have agreed on, in seconds; None before the first one."""
        with self._database.read() as connection:
            return service_settings.lease_s(connection)

    def running(self) -> list[RunningAttempt]:
        """Return every running attempt, with its heartbeat counter."""
        with self._database.read() as connection:
            return [RunningAttempt(*row) for row in connection.execute(_RUNNING)]

    def recover(self, running: RunningAttempt) -> str | None:
        """Take a job from a lost worker: queue it again, or fail it as `worker_lost` when no attempts are left.

        Any of the jobs that were lost together may have ended the worker. So that costs none of them an attempt, and
        from its second loss on a job runs alone (decision 24). Returns the job's new state; None when the attempt has
        ended or sent a heartbeat since the caller saw it.
        """
        with ends.logging_ends(self._database) as connection:
            seen = {"attempt_id": running.attempt_id, "seen_beat": running.beat, "finished_at": utc_now()}
            lost = connection.execute(_LOSE_ATTEMPT, seen).one_or_none()
            if lost is None:
                return None
            job = row_of(connection, tables.job, running.job_id)
            error = lost.error or _excuse(connection, lost.worker_id, job) or job_problem("worker_lost", SILENT)
            connection.execute(_END_ATTEMPT.values(error=error), {"attempt_id": running.attempt_id})
            tallies.add(connection, "lease_losses", job.kind)
            if job.state == "queued":  # it had not begun
                connection.execute(_END_ATTEMPT.values(state="given_back"), {"attempt_id": running.attempt_id})
                _requeue(connection, running.job_id, running.attempt, "worker_lost", counted=False)
                return "queued"
            sharing.charge(connection, running.attempt_id, is_lost=True)
            return _requeue_or_fail(connection, running.job_id, running.attempt, error, CANCELLED_AND_LOST)


def _start_attempt(connection: Connection, job_id: int, worker_id: str, waits_for: str | None) -> Claim | None:
    """Take a queued job. If its row cannot be read, the job fails with a code, and the result is None."""
    now, token = utc_now(), secrets.token_hex(16)
    state = "running" if waits_for is None else "queued"
    starts = {"new_state": state, "starts_at": now if waits_for is None else None, "waits_for": waits_for}
    job = connection.execute(_MARK_CLAIMED, {"job_id": job_id, "by": worker_id, **starts}).one()
    attempt = {
        "job_id": job_id,
        "number": job.attempt,
        "token": token,
        "worker_id": worker_id,
        "state": "running",
        "beat": 0,
        "started_at": now,
    }
    attempt_id = connection.execute(_BEGIN_ATTEMPT, attempt).scalar_one()
    said = {"state": state, "worker_id": worker_id} | ({"waiting": waits_for} if waits_for else {})
    _record_event(connection, job_id, job.attempt, "state", said)
    tallies.add(connection, "claims", job.kind)
    if waits_for is None:
        _observe_waiting(connection, job, now)
    problem = broken(job._mapping)
    if problem is not None:
        with about(job_id, job.attempt):
            logger.error("the job fails: %s", problem["detail"])
        _end_attempt(connection, attempt_id, "failed", error=problem)
        _finish_job(connection, job_id, job.attempt, "failed", problem, metrics=None)
        return None
    if waits_for is not None:
        # Workers of release 0.1.0 run every queued job that a server of theirs has submitted, unless it needs this.
        _change_job(connection, job_id, requirements=sorted({*job.requirements, name_of(SCHEMA)}))
    return Claim(
        job_id=job_id,
        attempt=job.attempt,
        token=token,
        attempt_id=attempt_id,
        worker_id=worker_id,
        **{name: getattr(job, name) for name in _OF_JOB},
    )


def _observe_waiting(connection: Connection, job: Any, now: datetime) -> None:
    if job.attempt == 1:  # a later one waited since an earlier one ended
        tallies.observe(connection, "waiting", job.kind, "", max(0.0, (now - job.created_at).total_seconds()))


def _cancel_jobs(connection: Connection, which: ColumnElement[bool]) -> None:
    """Cancel the jobs that match `which`: queued jobs at once; running jobs get one request to end."""
    now = utc_now()
    changed = {"cancel_requested_at": now, "version": _job.version + 1}
    claimed = which & (_job.state == "queued") & _job.waiting_reason.is_not(None)
    end_attempts = update(tables.attempt).where(
        _attempt.state == literal_column("'running'"), _attempt.job_id.in_(select(_job.id).where(claimed))
    )
    pending = job_problem("cancelled", CANCELLED_PENDING)
    connection.execute(end_attempts.values(state="cancelled", error=pending, finished_at=now))
    unclaimed = which & UNCLAIMED
    for queued, error in ((claimed, pending), (unclaimed, job_problem("cancelled", CANCELLED_BEFORE))):
        ended: dict[str, Any] = {"state": "cancelled", "error": error}
        sweeps.record_events(connection, queued, "state", {"state": "cancelled"}, now)
        sweeps.record_events(connection, queued, "done", ended, now)
        jobs = connection.execute(select(_job.id, _job.attempt, _job.kind).where(queued)).all()
        for kind, number in Counter(job.kind for job in jobs).items():
            tallies.add(connection, "outcomes", kind, "cancelled", number)
        for job in jobs:
            ends.note(connection, ends.Ended(job.id, job.attempt, job.kind, **ended, ran_s=None))
        values = {**ended, "finished_at": now, "waiting_reason": None, **changed}
        connection.execute(update(tables.job).where(queued).values(**values))
    running = which & (_job.state == "running") & _job.cancel_requested_at.is_(None)
    sweeps.record_events(connection, running, "state", {"state": "running", "cancel_requested": True}, now)
    connection.execute(update(tables.job).where(running).values(**changed))


def _record_event(connection: Connection, job_id: int, attempt: int, type_: str, data: dict[str, Any]) -> None:
    row = {"job_id": job_id, "attempt": attempt, "type": type_, "data": data, "created_at": utc_now()}
    connection.execute(_EVENT, row)


def _change_job(connection: Connection, job_id: int, **values: Any) -> None:
    connection.execute(_CHANGE_JOB, {"job_id": job_id, **values})


def _end_attempt(
    connection: Connection,
    attempt_id: int,
    state: str,
    *,
    error: dict[str, Any] | None = None,
    log: str | None = None,
    **values: Any,
) -> None:
    ended = {"state": state, "error": error, "log": log, "finished_at": utc_now(), **values}
    connection.execute(_END_ATTEMPT, {"attempt_id": attempt_id, **ended})
    if state != "given_back":
        sharing.charge(connection, attempt_id)


def _finish_job(
    connection: Connection, job_id: int, attempt: int, state: str, error: dict[str, Any] | None, **values: Any
) -> None:
    _change_job(connection, job_id, state=state, error=error, finished_at=utc_now(), waiting_reason=None, **values)
    _record_event(connection, job_id, attempt, "state", {"state": state})
    _record_event(connection, job_id, attempt, "done", {"state": state, "error": error})
    job = connection.execute(_RAN, {"job_id": job_id}).one()
    ran_s = None if job.started_at is None else max(0.0, (job.finished_at - job.started_at).total_seconds())
    outcome = tallies.outcome_of(state, error)
    tallies.add(connection, "outcomes", job.kind, outcome)
    if ran_s is not None:
        tallies.observe(connection, "duration", job.kind, outcome, ran_s)
    ends.note(connection, ends.Ended(job_id, attempt, job.kind, state, error, ran_s))


def _excuse(connection: Connection, worker_id: str, job: Any) -> dict[str, Any] | None:
    """Let the loss of a worker cost this job and those beside it no attempt; returns the error of their attempts. None
    if there were none beside it, or if it ran alone."""
    if job.exclusive_host or job.state != "running":
        return None
    beside = connection.execute(_LOST_WITH, {"of_worker": worker_id}).all()
    if not beside:
        return None
    ids = sorted([job.id, *(one.job_id for one in beside)])
    error = job_problem("worker_lost", LOST_TOGETHER.format(", ".join(map(str, ids))))
    connection.execute(_EXCUSE.where(_job.id.in_(ids)))
    marked = update(tables.attempt).where(_attempt.id.in_([one.id for one in beside]))
    connection.execute(marked.values(error=error))
    return error


def _requeue_or_fail(
    connection: Connection, job_id: int, attempt: int, error: dict[str, Any], if_cancelled: str
) -> str:
    """Queue or end a job whose worker could not end its attempt; returns its new state."""
    job = row_of(connection, tables.job, job_id)
    if job.cancel_requested_at is not None:
        _finish_job(connection, job_id, attempt, "cancelled", job_problem("cancelled", if_cancelled))
        return "cancelled"
    if job.attempt < job.max_attempts:
        _requeue(connection, job_id, attempt, "worker_lost", counted=True)
        return "queued"
    error["detail"] += f" It was attempt {job.attempt} of {job.max_attempts}."
    _finish_job(connection, job_id, attempt, "failed", error)
    return "failed"


def _requeue(connection: Connection, job_id: int, attempt: int, reason: str, *, counted: bool) -> None:
    values: dict[str, Any] = {} if counted else {"attempt": attempt - 1}
    values |= {"worker_id": None, "started_at": None, "waiting_reason": None, "progress": NO_PROGRESS}
    _change_job(connection, job_id, state="queued", **values)
    _record_event(connection, job_id, attempt, "state", {"state": "queued", "reason": reason})


def _with_partial(rows: staging.Slice, *, partial: bool) -> staging.Slice:
    """Return the rows with their column `partial`, where the table has one, set to this value."""
    return [
        (table, [{**row, "partial": partial} for row in of_table] if "partial" in table.c else of_table)
        for table, of_table in rows
    ]


def _values(claim: Claim, finish: Finish, state: str) -> Mapping[str, float] | None:
    """Return the values by which lists sort the job; None if it has several cases, or two sides."""
    if any(unit.side is not None for unit in finish.units):
        return None
    stopped = None if state == "succeeded" else state
    return values_of_job(finish.measurements, planned_processes(claim.spec), stopped)
