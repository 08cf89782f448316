"""The agent, one per host. It claims jobs that the host can run now, runs them, renews leases and records results."""

from __future__ import annotations

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
from collections.abc import Callable, Container

from app.errors import STORE_UNAVAILABLE, DatabaseBusy, FlopwatchError
from app.logs import about
from app.settings import Settings
from app.specs._code import RUNS_CODE
from app.states import LivingState, WorkerState
from app.store.database.engine import Database, open_database
from app.store.database.locking import patience
from app.store.files.opening import open_files
from app.store.queue.hosts import gpus_of_one_job
from app.store.queue.lease import Watcher, with_agreed_lease
from app.store.queue.registration import Registration
from app.store.queue.transitions import Queue
from app.store.records import Claim, Offer
from kernels.registry import ATTENTION, KERNELS
from workers import modules, tools
from workers.agent.job_run import RETRY_S, JobRun
from workers.agent.readings import Readings
from workers.agent.scratch import Scratch
from workers.devices.discovery import Host, discover
from workers.devices.locks import HOST, DeviceLocks, HeldDevices
from workers.jobs import RUNNERS
from workers.model.registry import MODELS
from workers.outcome import Abandoned, Cancelled, GivenBack, describe_error
from workers.processes.launch import Launcher

logger = logging.getLogger(__name__)

MAX_DEVICELESS = 4
"""Largest number of simultaneous jobs that only estimate: they need no device, but each has a process."""
MAX_CONNECTIONS = 2
"""Largest number of connections to a database server: hundreds of agents share its hundred or two."""
TICK_S = 0.05
"""Seconds between two checks of an idle agent for new jobs; a check costs microseconds."""
TURN_S = 2 * TICK_S
"""Seconds for which an agent claims nothing after a job, so that the host's other agents, which look for free devices
at every tick, take turns with it."""
STEADY_S = 0.5
"""Seconds for which others must hold the same devices before the store learns it: jobs follow each other faster."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""Seconds for which an agent claims nothing after it could not start a job, doubled each time until a job has run. So
an agent without threads or descriptors does not use up the attempts of the whole queue.
"""


def capabilities(*, allow_code: bool) -> frozenset[str]:
    """Return this host's names, as "family:name". Registries list names without importing the code behind them."""
    registries = {"attention": ATTENTION.names(), "kernel": KERNELS.names(), "model": MODELS.names()}
    names = {**registries, tools.FAMILY: tools.installed()}
    qualified = {f"{family}:{name}" for family, members in names.items() for name in members}
    return frozenset(qualified | {RUNS_CODE} if allow_code else qualified)


def versions() -> dict[str, str]:
    """Return the versions of the software that results depend on."""
    installed = {"python": platform.python_version()}
    for name in ("flopwatch", "torch", "triton"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


class Agent:
    """One worker. `run` returns when a signal has asked for it and the jobs have ended or been given back.

    Args:
        settings: Its settings.
        database: The store's database; the agent does not close it.
        host: The devices to use; those of this host if None.
        locks: The locks of these devices; those that all workers of this host share if None.
        launcher: Starts the jobs' processes; a new one if None.
        clock: Returns the time in seconds, from any beginning.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        host: Host | None = None,
        locks: DeviceLocks | None = None,
        launcher: Launcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._settings = settings
        self._database = database
        self._queue = Queue(database)
        self._registration = Registration(database)
        self._artifacts = open_files(settings, database)
        self._scratch = Scratch(settings.data_dir / "scratch")
        self._watch = database.watch()
        self._watcher = Watcher(self._queue, self._registration, settings.lease_s)
        self._host = discover() if host is None else host
        self._locks = DeviceLocks(self._host) if locks is None else locks
        self._clock = clock
        self._readings = Readings(self._host, settings.lease_s / 3)
        self._launcher = Launcher() if launcher is None else launcher
        self._capabilities = capabilities(allow_code=settings.allow_code)
        self._modules = modules.importable() if settings.allow_code else None
        self.runs: dict[int, JobRun] = {}
        """The running jobs, by the ids of their attempts: a job whose lease was lost, or that was retried, may be
        claimed again before the run of its earlier attempt has ended.
        """
        self._refused_with: Offer | None = None
        self._others_hold, self._others_since = frozenset[str](), -math.inf
        self._reported_others = frozenset[str]()
        self._next_beat = self._next_poll = self._claim_after = 0.0
        self._backoff_s = MIN_BACKOFF_S
        self._drains = 0
        self._drain_until: float | None = None
        self._wake, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self.drain())
        self._launcher.end_leftovers()
        self._launcher.start_warm()
        self._scratch.remove_those_of_dead_agents()
        # Without this, the first job would spend its timeout on importing torch, while another worker could run it.
        self._launcher.wait_until_warm()
        self.register()
        self._readings.start()
        error: str | None = "the worker ended by an error"
        try:
            self.serve_until_drained()
            error = None
        finally:
            self._readings.stop()
            self.give_back_all(error)
            signal.set_wakeup_fd(-1)
            self.close()
            self.announce("stopped")
            logger.info("worker %s stopped", self.id)

    def close(self) -> None:
        """End the warm parent, and free everything that the agent has opened."""
        self._launcher.close()
        self._locks.close()
        self._scratch.close()
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
                self._launcher.end_orphans()
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
        if self._watch.changed():
            self._refused_with = None
            self._pass_on_cancels()
        if self._drain_until is None and now >= self._claim_after:
            self._claim_jobs()

    def register(self) -> None:
        """Tell the store what this worker is and has."""
        self._registration.register_worker(
            worker_id=self.id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            kinds=sorted(RUNNERS),
            capabilities=sorted(self._capabilities),
            devices=self._host.as_devices(),
            versions=versions(),
            modules=self._modules,
        )
        gpus = ", ".join(gpu.name for gpu in self._host.gpus) or "no GPU"
        logger.info("worker %s ready: %s CPUs, %s", self.id, self._host.cpu_count, gpus)

    def _beat(self) -> None:
        claims = [run.claim for run in self.runs.values()]
        try:
            state: LivingState = "active" if self._drain_until is None else "draining"
            holders = self._locks.holders() if HOST in self._reported_others else []
            others = {"held_by_others": sorted(self._reported_others), "holders": holders}
            readings = {**(self._readings.latest() or {}), **others}
            renewal = self._queue.renew(claims, (self.id, state), readings)
        except STORE_UNAVAILABLE:
            self._watcher.skip()  # others could not renew their claims either
            raise
        if not renewal.knows_worker:
            self.register()
        for attempt_id in renewal.lost:
            self.runs[attempt_id].stop.set(Abandoned())
        self._cancel(renewal.cancel_requested)

    def _pass_on_cancels(self) -> None:
        if self.runs:
            self._cancel(self._queue.cancel_requested([run.claim.job_id for run in self.runs.values()]))

    def _cancel(self, job_ids: Container[int]) -> None:
        for run in self.runs.values():
            if run.claim.job_id in job_ids:
                run.stop.set(Cancelled())

    def join_ended(self) -> None:
        """Free what ended jobs have left, and pause claims if one could not run on this host."""
        for attempt_id, run in list(self.runs.items()):
            if run.ended:
                run.join()
                del self.runs[attempt_id]
                if self._locks.has_company:
                    self._claim_after = max(self._claim_after, self._clock() + TURN_S)
                if run.host_unfit:
                    with about(run.claim.job_id, run.claim.attempt):
                        logger.warning("the job cannot run here now; the next claim waits %g s", self._backoff_s)
                    self._pause_claims()
                else:
                    self._backoff_s = MIN_BACKOFF_S

    def _pause_claims(self) -> None:
        self._claim_after = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _claim_jobs(self) -> None:
        """Claim until nothing more fits. Tries only if the queue, or the offer, has changed since the last refusal.

        Without a free device the agent still makes an offer to jobs that only estimate.
        """
        while True:
            free = self._locks.take_free()
            claim = None
            try:
                self._note_others(free.taken)
                offer = self._offer(free)
                # Looked at after the devices are taken: a run that this host cannot serve sets `host_unfit` before it
                # frees them, and one that has freed them may not have been joined.
                if self._is_new(offer, free) and not any(map(self._is_to_join_first, self.runs.values())):
                    claim = self._queue.claim(self.id, offer)
                    self._refused_with = offer if claim is None else self._refused_with
            finally:
                if claim is None:
                    free.release()
            if claim is None:
                return
            with about(claim.job_id, claim.attempt):
                self._start(claim, free)
            if self._clock() < self._claim_after:
                return

    def _is_to_join_first(self, run: JobRun) -> bool:
        """Return True if a pause of the claims follows when the run is joined."""
        freed = (run.devices.alone or run.devices.gpus) and not run.devices.descriptors
        return run.host_unfit or (self._locks.has_company and bool(freed))

    def _note_others(self, taken: frozenset[str] | None) -> None:
        """Note which devices are held by others than this agent's runs; a lasting change is reported by a heartbeat."""
        if taken is None:
            return
        now = self._clock()
        for run in self.runs.values():
            if run.devices.descriptors:
                taken -= {HOST, *(gpu.uuid for gpu in run.devices.gpus)}
        if taken != self._others_hold:
            self._others_hold, self._others_since = taken, now
        elif taken != self._reported_others and now - self._others_since >= STEADY_S:
            self._reported_others, self._next_beat = taken, now

    def _is_new(self, offer: Offer, free: HeldDevices) -> bool:
        return offer != self._refused_with and bool(free.descriptors or offer.deviceless)

    def _offer(self, free: HeldDevices) -> Offer:
        deviceless = sum(run.claim.device_type == "none" for run in self.runs.values())
        return Offer(
            kinds=frozenset(RUNNERS),
            capabilities=self._capabilities,
            total_gpus=gpus_of_one_job([gpu.uuid for gpu in self._host.gpus]),
            free_gpus=gpus_of_one_job([gpu.uuid for gpu in free.gpus]),
            idle=free.alone,
            deviceless=deviceless < MAX_DEVICELESS,
        )

    def _start(self, claim: Claim, free: HeldDevices) -> None:
        """Start the job. An error of ours ends this attempt and not the agent, and the next claim waits a while."""
        kept = None
        try:
            kept = self._devices_for(claim, free)
            run = JobRun(
                claim,
                kept,
                queue=self._queue,
                artifacts=self._artifacts,
                launcher=self._launcher,
                settings=self._settings,
                scratch=self._scratch.path,
                neighbours=sorted({run.claim.job_id for run in self.runs.values()} - {claim.job_id}),
                on_end=self._wake_up,
                clock=self._clock,
            )
            run.start()
        except Exception as error:
            logger.exception("the job cannot be started; the next claim waits %g s", self._backoff_s)
            self._pause_claims()
            (free if kept is None else kept).release()
            if isinstance(error, BlockingIOError):  # another process took the host first; that is not an error
                self._queue.give_back(claim)
            else:
                self._queue.give_up(claim, describe_error(error))
        else:
            logger.info("starting a job of kind %s", claim.kind)
            self.runs[claim.attempt_id] = run

    def _devices_for(self, claim: Claim, free: HeldDevices) -> HeldDevices:
        """Return the job's share of the free devices, and give back the others."""
        if claim.device_type == "none" and not claim.exclusive_host:
            free.release()
            return HeldDevices()
        on_cpu = claim.device_type in ("cpu", "none") or not self._host.gpus
        alone = on_cpu or claim.exclusive_host
        return self._locks.keep_only(free, gpus=0 if on_cpu else claim.devices, alone=alone)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the agent wakes up anyhow
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
                self._settings.grace_s,
            )
            self._drain_until = self._clock() + self._settings.grace_s
            self.announce("draining")
        if self._drains > 1:
            self._drain_until = -math.inf
        if self._clock() >= self._drain_until:
            for run in self.runs.values():
                run.stop.set(GivenBack())
        self.join_ended()
        return not self.runs

    def announce(self, state: WorkerState) -> None:
        """Record the agent's state in the store. An unwritable store does not keep the agent from ending."""
        try:
            with patience(RETRY_S):
                self._registration.set_worker_state(self.id, state)
        except FlopwatchError as error:
            logger.warning("the store does not know yet that this worker is %s: %s", state, error)

    def give_back_all(self, error: str | None) -> None:
        """Give all jobs back when the agent ends: others can run them. After an `error` of ours the attempts count."""
        for run in self.runs.values():
            run.stop.set(GivenBack(error))
        for run in self.runs.values():
            run.join()
        self.runs.clear()


def serve(settings: Settings) -> None:
    """Open the database, migrating it if needed, and run an agent until a signal ends it."""
    database = open_database(settings, connections=MAX_CONNECTIONS)
    try:
        Agent(with_agreed_lease(database, settings), database).run()
    finally:
        database.close()
