"""The agent, one per host. It claims jobs that the host can run now, runs them, renews leases and records results."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

from app.logs import about
from app.settings import Settings
from app.specs._code import RUNS_CODE
from app.specs.kernel import LINEAR
from app.store.database.engine import Database, open_database
from app.store.files.opening import open_files
from app.store.queue.hosts import gpus_of_one_job
from app.store.queue.lease import with_agreed_lease
from app.store.records import Claim, Offer
from kernels.registry import ATTENTION, KERNELS
from workers import tools
from workers.agent.fitness import Examination, Judge, Unfit
from workers.agent.host_check import HostCheck
from workers.agent.job_run import JobRun
from workers.agent.readings import Readings
from workers.agent.scratch import Scratch
from workers.agent.serving import TICK_S, Serving
from workers.changes import CHANGES
from workers.devices.discovery import Host, discover
from workers.devices.locks import HOST, DeviceLocks, HeldDevices
from workers.jobs import RUNNERS
from workers.model.registry import MODELS
from workers.outcome import describe_error
from workers.processes.launch import Launcher

logger = logging.getLogger(__name__)

MAX_DEVICELESS = 4
"""Largest number of simultaneous jobs that only estimate: they need no device, but each has a process."""
MAX_CONNECTIONS = 2
"""Largest number of connections to a database server: hundreds of agents share its hundred or two."""
TURN_S = 2 * TICK_S
"""Seconds for which an agent claims nothing after a job, so that the host's other agents, which look for free devices
at every tick, take turns with it."""
STEADY_S = 0.5
"""Seconds for which others must hold the same devices before the store learns it: jobs follow each other faster."""


def capabilities(*, allow_code: bool) -> frozenset[str]:
    """Return this host's names, as "family:name". Registries list names without importing the code behind them."""
    registries = {"attention": ATTENTION.names(), "kernel": [*KERNELS.names(), LINEAR], "model": MODELS.names()}
    registries["change"] = CHANGES.names()
    names = {**registries, tools.FAMILY: tools.installed()}
    qualified = {f"{family}:{name}" for family, members in names.items() for name in members}
    return frozenset(qualified | {RUNS_CODE} if allow_code else qualified)


class Agent(Serving[JobRun]):
    """One worker. `run` returns when a signal has asked for it and the jobs have ended or been given back. `database`:
    the store's; the agent does not close it. `host`: the devices to use, by default those of this host. `locks`: of
    these devices, by default those that all workers of this host share. `launcher`: starts the jobs' processes; None: a
    new one. `clock`: returns the time in seconds, from any beginning."""

    _settle_s = 0.0
    """Seconds for which a failed job waits for a signal to this agent, of which it may be an effect."""
    _unfit_counts = False
    """See `Judge`."""
    _environment: Mapping[str, str] = MappingProxyType({})
    """Variables that the jobs' processes have beside those of this process."""

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
        super().__init__(settings, database, clock=clock)
        self._artifacts = open_files(settings, database)
        self._scratch = Scratch(settings.data_dir / "scratch")
        self._host = discover() if host is None else host
        self._locks = DeviceLocks(self._host) if locks is None else locks
        self._loads = Readings(self._host, settings.lease_s / 3)
        self._launcher = Launcher() if launcher is None else launcher
        self._check = HostCheck(settings, self._launcher, self._artifacts, self._loads, self._scratch.path)
        self._capabilities = capabilities(allow_code=settings.allow_code)
        self._refused_with: Offer | None = None
        self._others_hold, self._others_since = frozenset[str](), -math.inf
        self._reported_others = frozenset[str]()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._take_signals()
        self._launcher.end_leftovers()
        self._launcher.start_warm()
        self._scratch.remove_those_of_dead_agents()
        # Without this, the first job would spend its timeout on importing torch, while another worker could run it.
        self._launcher.wait_until_warm()
        self.register()
        self._loads.start()
        self._serve_until_signal()

    def close(self) -> None:
        """End the warm parent, and free everything that the agent has opened."""
        self._loads.stop()
        self._launcher.close()
        self._locks.close()
        self._scratch.close()
        super().close()

    def register(self) -> None:
        """Tell the store what this worker is and has."""
        gpus = ", ".join(gpu.name for gpu in self._host.gpus) or "no GPU"
        self._register(self._host.as_devices(), f"{self._host.cpu_count} CPUs, {gpus}")

    def _readings(self) -> dict[str, Any]:
        return {**(self._loads.latest() or {}), "held_by_others": sorted(self._reported_others)}

    def _tend(self) -> None:
        self._launcher.end_orphans()

    def _note_change(self) -> None:
        self._refused_with = None

    def _glance(self) -> Unfit | None:
        return self._check.glance()

    def _begin_examination(self) -> Examination:
        free = HeldDevices()
        if self._host.gpus:
            free = self._locks.take_free()
            free = self._locks.keep_only(free, gpus=len(free.gpus), alone=False) if free.gpus else free

        def done() -> None:
            free.release()
            self._wake_up()

        return Examination(lambda: self._check.whole(free), done)

    def _after(self, run: JobRun) -> None:
        if self._locks.has_company:
            self._claim_after = max(self._claim_after, self._clock() + TURN_S)

    def _claim_jobs(self) -> None:
        """Claim until nothing more fits. Tries only if the queue, or the offer, has changed since the last refusal.

        Without a free GPU the agent still makes an offer to jobs that only estimate, unless a job has the host alone.
        """
        while True:
            free = self._locks.take_free()
            claim = None
            try:
                self._note_others(free.taken)
                offer = self._offer(free)
                # Looked at after the devices are taken: a run that this host cannot serve sets `unfit` before it
                # frees them, and one that has freed them may not have been joined.
                is_new = offer != self._refused_with and bool(free.descriptors) and not self._holds_some_of(free)
                if is_new and not any(map(self._is_to_join_first, self.runs.values())):
                    claim = self._queue.claim(self.id, offer)
                    self._refused_with = offer if claim is None else self._refused_with
            finally:
                if claim is None:
                    free.release()
            if claim is None:
                return
            with about(claim.job_id, claim.attempt):
                self._start(claim, free)
            if self.fitness.unfit is not None or self._clock() < self._claim_after:
                return

    def _is_to_join_first(self, run: JobRun) -> bool:
        """Return True if a pause of the claims follows when the run is joined."""
        freed = (run.devices.alone or run.devices.gpus) and not run.devices.descriptors
        return run.unfit is not None or (self._locks.has_company and bool(freed))

    def _holds_some_of(self, free: HeldDevices) -> bool:
        """Return True if a run still holds what seems free: somebody has removed the files of its locks."""
        held = [run.devices for run in self.runs.values() if run.devices.descriptors]
        return any(one.alone or free.alone or set(one.gpus) & set(free.gpus) for one in held)

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
        """Start the job. An error of ours ends this attempt and not the agent, which is unfit for a while."""
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
                environment=self._environment,
                settle_s=self._settle_s,
                judge=Judge(self._check.of_job, self.fitness.blame, self._unfit_counts),
            )
            run.start()
        except Exception as error:
            logger.exception("the job cannot be started")
            (free if kept is None else kept).release()
            self._become_unfit(Unfit("exhausted", f"no job can be started: {describe_error(error)}"))
            self._queue.give_up(claim, describe_error(error))
        else:
            logger.info("starting a job of kind %s", claim.kind)
            self.runs[claim.attempt_id] = run

    def _devices_for(self, claim: Claim, free: HeldDevices) -> HeldDevices:
        """Return the job's share of the free devices, and give back the others."""
        without = claim.device_type == "none"
        on_cpu = not without and (claim.device_type == "cpu" or not self._host.gpus)
        gpus = 0 if without or on_cpu else claim.devices
        return self._locks.keep_only(free, gpus=gpus, alone=on_cpu or claim.exclusive_host)


def serve(settings: Settings) -> None:
    """Open the database, migrating it if needed, and run an agent until a signal ends it."""
    with closing(open_database(settings, connections=MAX_CONNECTIONS)) as database:
        Agent(with_agreed_lease(database, settings), database).run()
