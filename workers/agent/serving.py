"""The part that all workers share: registering, renewing claims, passing on cancels, draining."""

import contextlib
import importlib.metadata
import logging
import math
import os
import platform
import random
import secrets
import select
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any, Generic, Protocol, TypeVar

from app.errors import STORE_UNAVAILABLE, Conflict, DatabaseBusy, FlopwatchError, NotFound
from app.logs import about
from app.settings import Settings
from app.specs._schema import SCHEMA
from app.states import LivingState, WorkerState
from app.store.database.engine import Database
from app.store.database.locking import patience
from app.store.queue.lease import Watcher
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.records import Claim
from workers.agent.fitness import Examination, Fitness, Unfit, of_another_version
from workers.agent.job_run import RETRY_S
from workers.jobs import RUNNERS
from workers.outcome import Abandoned, Cancelled, GivenBack

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two checks of an idle worker for new jobs; a check costs microseconds."""
GLANCE_S = 1.0
"""Seconds between two glances at what all jobs need."""


def versions() -> dict[str, str]:
    """Return the versions of the software that results depend on."""
    installed = {"python": platform.python_version()}
    for name in ("flopwatch", "torch", "triton"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


class Stop(Protocol):
    """Takes the reason why a job must end before its time."""

    def set(self, reason: Cancelled | GivenBack | Abandoned) -> None:
        """Ask the job to end. Any thread may call this, again and again."""


class Run(Protocol):
    """A claimed job, as the worker sees it."""

    @property
    def claim(self) -> Claim: ...
    @property
    def stop(self) -> Stop: ...
    @property
    def ended(self) -> bool:
        """True if nothing is left to do: the outcome is recorded, or must not be."""

    @property
    def unfit(self) -> Unfit | None:
        """Why the job went back to the queue, or cannot go on now, if that is this worker's fault and not the job's."""

    @property
    def succeeded(self) -> bool:
        """True if the job has succeeded."""

    def join(self) -> None:
        """Wait for the end and free the remaining resources."""


RunT = TypeVar("RunT", bound=Run)


class Serving(ABC, Generic[RunT]):
    """A worker without a place where jobs run. `serve_until_drained` returns when `drain` was called and no job runs.
    `database`: the store's database; the worker does not close it. `clock`: returns the time in seconds, from any
    beginning."""

    _capabilities: frozenset[str]
    _given_back = GivenBack()
    """How jobs end that run when the worker must end."""

    def __init__(self, settings: Settings, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._settings = settings
        self._database = database
        self._queue = Queue(database)
        self._registration = Registration(database)
        self._watch = database.watch()
        self._watcher = Watcher(self._queue, self._registration, settings.lease_s)
        self._clock = clock
        self.runs: dict[int, RunT] = {}
        """The running jobs, by the ids of their attempts: a job whose lease was lost, or that was retried, may be
        claimed again before the run of its earlier attempt has ended."""
        self._next_beat = self._next_poll = self._claim_after = 0.0
        self.fitness = Fitness(clock, self._queue.has_several_users)
        self._next_glance = 0.0
        self._examination: Examination | None = None
        self._grace_s = settings.grace_s
        self._drains = 0
        self._drain_until: float | None = None
        self._wake, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @abstractmethod
    def register(self) -> None:
        """Tell the store what this worker is and has."""

    def _register(self, devices: Sequence[dict[str, Any]], described: str) -> None:
        self._registration.register_worker(
            worker_id=self.id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            kinds=sorted(RUNNERS),
            capabilities=sorted(self._capabilities),
            devices=devices,
            versions=versions(),
            state=self._state,
            unfit=self.fitness.as_json(),
        )
        logger.info("worker %s ready: %s", self.id, described)

    @abstractmethod
    def _claim_jobs(self) -> None:
        """Claim and start the jobs that can start now."""

    @abstractmethod
    def _note_change(self) -> None:
        """Take note that something was committed: a claim that was refused may succeed now."""

    def _readings(self) -> dict[str, Any] | None:
        """Return what the worker's devices do now; None if nobody wants to know."""

    def _tend(self) -> None:
        """Do what is due at every tick, whether the store can be written or not."""

    def _after(self, run: RunT) -> None:
        """Take note that a run has ended and was joined."""

    def _serve_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT; then give back what still runs after the grace."""
        error: str | None = "the worker ended by an error"
        try:
            self.serve_until_drained()
            error = None
        finally:
            self._end(error)

    def _end(self, error: str | None) -> None:
        self.give_back_all(error)
        with contextlib.suppress(*STORE_UNAVAILABLE), patience(RETRY_S):
            self._retry_excused()
        signal.set_wakeup_fd(-1)
        self.close()
        self.announce("stopped")
        logger.info("worker %s stopped", self.id)

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self.drain())

    def close(self) -> None:
        self._watch.close()
        os.close(self._wake)
        os.close(self._wake_in)

    def serve_until_drained(self) -> None:
        """Serve the queue until `drain` was called and no job runs any more."""
        while True:
            pause_s = TICK_S
            try:
                if self._drained():
                    return
                self._tend()
                left_s = math.inf if self._drain_until is None else self._drain_until - self._clock()
                # After the grace, too, leases are renewed: runs may still be storing their results.
                with patience(max(left_s, RETRY_S)):
                    self.serve_queue()
            except STORE_UNAVAILABLE as error:
                logger.warning("the store cannot be written now, trying again: %s", error)
                if not isinstance(error, DatabaseBusy):  # a busy database has made us wait already
                    pause_s = RETRY_S * random.uniform(0.5, 1.5)  # agents of many hosts do not come back at once
            except Exception:
                # No error here may harm the running jobs.
                logger.exception("the queue cannot be served now, trying again")
                pause_s = RETRY_S
            if select.select([self._wake], [], [], pause_s)[0]:
                os.read(self._wake, 4096)

    def serve_queue(self) -> None:
        """Do what is due now: renew, take note of ended jobs and of cancels, claim jobs and start them."""
        now = self._clock()
        if now >= self._next_beat:
            self._beat()
            self._next_beat = now + self._watcher.lease_s / 3
        if now >= self._next_poll:
            self._watcher.poll()
            self._next_poll = now + self._watcher.lease_s / 4
        self.join_ended()
        self._retry_excused()
        if self._watch.changed():
            self._note_change()
            if self.runs:
                self._cancel(self._queue.cancel_requested([run.claim.job_id for run in self.runs.values()]))
        if self._drain_until is None and now >= self._claim_after and self._is_fit():
            self._claim_jobs()

    @property
    def _state(self) -> LivingState:
        if self._drain_until is not None:
            return "draining"
        return "active" if self.fitness.unfit is None else "unfit"

    def _is_fit(self) -> bool:
        """Return True if the worker may claim. Each try is due later than the one before, and no try holds this thread
        up: it has one of its own."""
        fitness = self.fitness
        found = next((run.unfit for run in self.runs.values() if run.unfit is not None and not run.ended), None)
        if fitness.unfit is None:
            if found is None and self._clock() >= self._next_glance:
                found, self._next_glance = self._glance(), self._clock() + GLANCE_S
            if found is None:
                return True
        elif not fitness.is_due:
            return False
        elif found is None and fitness.is_told_by_jobs:
            found = self._glance()
        elif found is None:
            if self._examination is None:
                self._examination = self._begin_examination()
            if not self._examination.is_done:
                return False
            found, self._examination = self._examination.found, None
        self._next_beat = self._clock()  # tell it
        if found is not None:
            self._become_unfit(found)
            return False
        fitness.regain()
        self._note_change()
        return True

    def _become_unfit(self, unfit: Unfit) -> None:
        self.fitness.lose(unfit)
        self._next_beat = self._clock()

    def _glance(self) -> Unfit | None:
        """Return why the worker is unfit, as far as that can be seen in a millisecond."""
        return None

    @abstractmethod
    def _begin_examination(self) -> Examination:
        """Begin to find out whether an unfit worker is fit again."""

    def _beat(self) -> None:
        claims = [run.claim for run in self.runs.values()]
        try:
            renewal = self._queue.renew(claims, (self.id, self._state), self._readings(), self.fitness.as_json())
        except STORE_UNAVAILABLE:
            self._watcher.skip()  # others could not renew their claims either
            raise
        if not renewal.knows_worker:
            self.register()
        for attempt_id in renewal.lost:
            self.runs[attempt_id].stop.set(Abandoned())
        self._cancel(renewal.cancel_requested)
        if renewal.server is not None and renewal.server["schema_number"] > SCHEMA and not self.fitness.is_for_good:
            self._become_unfit(of_another_version(renewal.server))

    def _cancel(self, job_ids: Container[int]) -> None:
        for run in self.runs.values():
            if run.claim.job_id in job_ids:
                run.stop.set(Cancelled())

    def join_ended(self) -> None:
        """Free what ended jobs have left, and claim nothing if one could not run here."""
        for attempt_id, run in list(self.runs.items()):
            if run.ended:
                run.join()
                del self.runs[attempt_id]
                self._after(run)
                if run.unfit is not None:
                    with about(run.claim.job_id, run.claim.attempt):
                        self._become_unfit(run.unfit)
                elif run.succeeded:
                    self.fitness.ran_well()

    def _retry_excused(self) -> None:
        """Queue the jobs again that failed without fault. Those that the store does not take now stay noted."""
        for claim in self.fitness.excused(self.runs):
            with about(claim.job_id, claim.attempt), contextlib.suppress(Conflict, NotFound):
                self._queue.retry(claim.job_id)
                logger.warning("queued again, since its failure was this host's")
            self.fitness.forget(claim)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the worker wakes up anyhow
            os.write(self._wake_in, b"e")

    def drain(self) -> None:
        """Claim no more jobs, and end when the present ones have ended or their grace is over; a second call ends the
        grace."""
        self._drains += 1

    def _drained(self) -> bool:
        """Return True if a signal asked for the end and nothing runs any more. Gives jobs back after the grace."""
        if self._drains == 0:
            return False
        if self._drain_until is None:
            logger.info(
                "draining: %s running; what is not done within %g s goes back to the queue (a second signal: at once)",
                len(self.runs),
                self._grace_s,
            )
            self._drain_until = self._clock() + self._grace_s
            self.announce("draining")
        if self._drains > 1:
            self._drain_until = -math.inf
        if self._clock() >= self._drain_until:
            for run in self.runs.values():
                run.stop.set(self._given_back)
        self.join_ended()
        return not self.runs

    def announce(self, state: WorkerState) -> None:
        """Record the worker's state in the store. An unwritable store does not keep the worker from ending."""
        try:
            with patience(RETRY_S):
                self._registration.set_worker_state(self.id, state)
        except FlopwatchError as error:
            logger.warning("the store does not know yet that this worker is %s: %s", state, error)

    def give_back_all(self, error: str | None) -> None:
        """Give all jobs back when the worker ends: others can run them. After an `error` of ours the attempts count."""
        for run in self.runs.values():
            run.stop.set(GivenBack(error) if error is not None else self._given_back)
        for run in self.runs.values():
            run.join()
        self.runs.clear()
