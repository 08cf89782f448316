"""The agent of one job, in its allocation: it takes the claim over, runs the job like any agent, and ends."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.errors import STORE_UNAVAILABLE, CannotRunHere, LeaseLost
from app.settings import Settings
from app.states import LivingState
from app.store.database.engine import Database, open_database
from app.store.queue.lease import with_agreed_lease
from app.store.records import Claim
from workers.agent.agent import MAX_CONNECTIONS, Agent
from workers.devices.locks import HeldDevices
from workers.jobs._ranks import VARIABLE
from workers.outcome import GivenBack
from workers.slurm import handover, node
from workers.slurm.handover import HandOver
from workers.slurm.node import DEVICES_S

logger = logging.getLogger(__name__)

AWAY_S = 600.0
"""Seconds for which an agent waits for a store that is away before its job has begun."""
AGAIN_S = 2.0
Answer = TypeVar("Answer")
ENDED = "Slurm ended its allocation: by preemption, its time limit, or scancel"


class OneJobAgent(Agent):
    """The agent of the job in a hand-over file. It takes no other, so for the queue it is draining from the start."""

    _settle_s = 2.0
    _unfit_counts = True
    _given_back = GivenBack(ENDED)  # the attempt counts: a job that outlasts every allocation must end some time

    def __init__(
        self, settings: Settings, database: Database, file: Path, handed: HandOver, variables: dict[str, str]
    ) -> None:
        super().__init__(settings, database)
        self._file = file
        self._environment = variables
        self._handed = handed
        self._node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
        self._has_begun = False
        self._taken: Path | None = None
        """The hand-over file, once the claim was taken over."""
        self._grace_s = 0.0  # a scheduler that sends SIGTERM kills soon

    def run(self) -> None:
        """Run the job to its end, or until a signal. Raises CannotRunHere: the job has not begun: the node lacks its
        devices, or a signal came; LeaseLost: this allocation is not needed."""
        self._take_signals()
        self._launcher.end_leftovers()
        self._launcher.start_warm()  # who imports meanwhile need not be waited for: the job's time begins afterwards
        self._scratch.remove_those_of_dead_agents()
        free = node.wait_for_devices(self._locks, self._host, lambda: self._drains > 0)
        try:
            self._check_node(free)
            claim = self._take_over()
        except BaseException:
            free.release()
            self.close()
            raise
        _patiently(self.register)
        self._loads.start()
        self._has_begun = True
        self._start(claim, free)
        self._serve_until_signal()

    def close(self) -> None:
        super().close()
        if self._taken is not None:
            self._taken.unlink(missing_ok=True)

    @property
    def _state(self) -> LivingState:
        return "draining"

    def _check_signals(self) -> None:
        if self._drains > 0:
            raise CannotRunHere(f"{ENDED}. The job has not begun.")

    def _check_node(self, free: HeldDevices) -> None:
        """Raise CannotRunHere if the node lacks what the job needs. The claim is not taken over yet, so that the worker
        that submitted it starts it elsewhere."""
        self._check_signals()
        needs, gpus = self._handed, self._host.gpus
        on_cpu = needs.device_type in ("cpu", "none") or not gpus
        if needs.device_type == "cuda" and len(gpus) < needs.devices:
            raise CannotRunHere(
                f"the job needs {needs.devices} GPUs, and its process on {self._node} sees {len(gpus)}."
            )
        if needs.device_type != "none" and (
            not free.descriptors
            or (not free.alone and (on_cpu or needs.exclusive_host))
            or (not on_cpu and len(free.gpus) < needs.devices)
        ):
            raise CannotRunHere(f"Another Flopwatch held the devices of {self._node} for {DEVICES_S:g} s.")

    def _take_over(self) -> Claim:
        new_token = secrets.token_hex(16)

        def take_over() -> Claim:
            self._check_signals()
            return self._queue.take_over(self._handed.claim, new_token, self.id)

        claim = _patiently(take_over)
        with contextlib.suppress(FileNotFoundError):
            self._taken = self._file.rename(handover.taken(self._file))
        return claim

    def _devices_for(self, claim: Claim, free: HeldDevices) -> HeldDevices:
        if claim.device_type == "none":  # Slurm keeps it from nodes that a job has alone
            free.release()
            return HeldDevices()
        return super()._devices_for(claim, free)

    def _claim_jobs(self) -> None:
        """Claim nothing: there is one job."""

    def _drained(self) -> bool:
        return super()._drained() or (self._has_begun and not self.runs)


def _opened(settings: Settings) -> tuple[Settings, Database]:
    database = open_database(settings, connections=MAX_CONNECTIONS)
    try:
        return with_agreed_lease(database, settings), database
    except BaseException:
        database.close()
        raise


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """Return an answer of the store, which may be away for a while."""
    give_up_at = time.monotonic() + AWAY_S
    while True:
        try:
            return ask()
        except STORE_UNAVAILABLE as error:
            if time.monotonic() >= give_up_at:
                raise
            logger.warning("the store cannot be used now, trying again: %s", error)
            time.sleep(AGAIN_S)


def serve(settings: Settings, file: Path) -> None:
    """Open the database, and run the job in a hand-over file. Raises CannotRunHere: the file, this host or the database
    cannot be used, or the job was given to somebody else."""
    handed = handover.read(file)
    nodes = handed.nodes
    index = int(os.environ.get("SLURM_PROCID", 0)) if nodes > 1 else 0
    if index > 0:
        node.serve(settings, handed.claim, nodes, index)
        return
    variables = {VARIABLE: node.nodes_of(handed.claim, nodes).to_json()} if nodes > 1 else {}
    settings, database = _patiently(lambda: _opened(settings))
    try:
        OneJobAgent(settings, database, file, handed, variables).run()
    except LeaseLost as error:
        file.unlink(missing_ok=True)
        raise CannotRunHere(f"{error.detail} This allocation is not needed.") from error
    finally:
        database.close()
