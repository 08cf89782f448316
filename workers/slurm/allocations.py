"""The allocations of claimed jobs: submits them, watches them, and ends those that nobody needs. One thread does it.

A claim is this worker's until the agent in the allocation takes it over, which changes its token. Until then the worker
renews it and watches the allocation; every write of ours about the claim is fenced, so when the agent was faster,
nothing happens. What Slurm says decides only about allocations whose claim is still ours.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from app.errors import STORE_UNAVAILABLE, LeaseLost, is_no_space, job_problem
from app.logs import about
from app.specs import SpecBase
from app.specs._schema import fingerprint
from app.store.database.locking import patience
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish
from workers.agent.fitness import BLAMED_S, Unfit, of_another_version
from workers.jobs._base import parse_spec
from workers.outcome import Abandoned, Cancelled, GivenBack, RunnerError, describe_error
from workers.slurm.client import PREFIX, CommandFailed, Listed, NoAnswer, SlurmClient
from workers.slurm.handover import HandOverFolder, mark_of
from workers.slurm.settings import SlurmSettings

logger = logging.getLogger(__name__)

LAST_WORDS_BYTES = 500
"""Bytes of an allocation's output that go into the reason why its job waits."""
TRIES = 4
"""Allocations of one claim that may end in a row before the job begins. Then the worker is unfit."""
PAUSE_S = 1.0
"""Seconds before the second of them is submitted; each further pause is twice as long."""
OF_LIMITS = re.compile(r"QOS|policy|submit limit|temporarily|too many", re.IGNORECASE)
"""Words of refusals that may be about how many jobs there are, and not about this one."""
WRITE_S = 5.0
"""Seconds for which a write about a job waits for the store, before the next turn tries again."""


@dataclass
class Allocation:
    """A claimed job on its way into an allocation; for the worker, one of its runs."""

    claim: Claim
    wake: Callable[[], None]
    reason: Cancelled | GivenBack | Abandoned | None = None
    """Why it must end before its agent takes it over."""
    unfit: Unfit | None = None
    """Why it went back, if sbatch would refuse other jobs, too."""
    succeeded: bool = False
    """True if an agent has taken it over: the nodes can run jobs."""
    done: threading.Event = field(default_factory=threading.Event)
    submitted: bool = False
    """True once sbatch was tried; False again from a failure until the next try."""
    failures: int = 0
    """How often in a row it ended before the job began."""
    not_before: float = 0.0
    """When it may be submitted, on the clock."""
    slurm_id: str | None = None
    refusal: str | None = None
    """What sbatch said when it failed."""
    unanswered: bool = False
    """True if it failed for want of an answer: then Slurm may have the allocation."""
    told: str = ""
    """What the job says that it waits for."""

    @property
    def mark(self) -> str:
        return mark_of(self.claim.token)

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.claim.job_id}-{self.claim.attempt}"

    @property
    def stop(self) -> Allocation:
        return self

    @property
    def ended(self) -> bool:
        return self.done.is_set()

    def set(self, reason: Cancelled | GivenBack | Abandoned) -> None:
        """Ask it to end; a lost claim outranks the other reasons."""
        if self.reason is None or isinstance(reason, Abandoned):
            self.reason = reason
            self.wake()

    def join(self) -> None:
        self.done.wait()


class Allocations(threading.Thread):
    """Watches allocations, from `start` to `close`."""

    def __init__(
        self,
        settings: SlurmSettings,
        folder: HandOverFolder,
        queue: Queue,
        *,
        client: SlurmClient,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(name="slurm")
        self._settings = settings
        self._folder = folder
        self._queue = queue
        self._client = client
        self._on_end = on_end
        self._excused_first: dict[int, float] = {}
        """When a job went back first since the cluster refused its allocation, on the clock."""
        self._guard = threading.Lock()
        self._own: dict[str, Allocation] = {}
        """By mark: those whose claims are ours."""
        self._active: set[str] = set()
        """Marks of the allocations that Slurm had not ended at the last look."""
        self._unwanted: set[str] = set()
        """Ids of allocations that are to be cancelled."""
        self._wanted = threading.Event()
        self._closing = False
        self.answers = False
        """True if Slurm answered the last question."""
        self.silence: str | None = None
        """Why it did not."""

    def room(self) -> int:
        with self._guard:
            return self._settings.max_jobs - len(self._active | self._own.keys())

    def add(self, claim: Claim) -> Allocation:
        """Take a claim; its allocation is submitted soon."""
        allocation = Allocation(claim, self._wanted.set)
        with self._guard:
            self._own[allocation.mark] = allocation
        self._wanted.set()
        return allocation

    def close(self) -> None:
        """End, once all claims have ended."""
        self._closing = True
        self._wanted.set()
        self.join()

    def run(self) -> None:
        closing = False
        while not closing or self._own:
            closing = self._closing
            self._wanted.clear()
            try:
                with patience(WRITE_S):
                    self._turn()
            except STORE_UNAVAILABLE as error:
                logger.warning("the store cannot be written now, trying again: %s", error)
            except Exception:  # an error here must not end the watching
                logger.exception("the allocations cannot be looked after now, trying again")
            if not closing:
                self._wanted.wait(self._settings.poll_s)

    def _turn(self) -> None:
        """Submit what is new, look at all allocations in one question, judge them, and cancel what is not needed."""
        with self._guard:
            own = list(self._own.values())
        for allocation in own:
            if allocation.submitted or allocation.reason is not None or time.monotonic() < allocation.not_before:
                continue
            with about(allocation.claim.job_id, allocation.claim.attempt):
                if not self._submit(allocation):
                    break  # the look tells whether others would fare better
        # Claims that end from here on are judged by the next look: one that was just taken over may look pending.
        ours_before = {allocation.mark for allocation in own if not allocation.ended}
        try:
            answer = self._client.allocations()
        except CommandFailed as error:
            logger.warning("Slurm does not answer now, trying again: %s", error)
            self.silence = str(error)
            self._without_slurm(own)
            return
        self.answers, self.silence = True, None
        # Of two with one mark, since the answer to the first sbatch came too late, the one counts that goes on.
        listed = {one.comment: one for one in sorted(answer, key=lambda one: not one.is_final)}
        by_id = {one.id: one for one in answer}
        with self._guard:
            self._active = {mark for mark, one in listed.items() if not one.is_final}
        for allocation in own:
            if not allocation.ended:
                # By its id where it is known: some sites' plugins write comments of their own.
                self._judge(allocation, by_id.get(allocation.slurm_id or "") or listed.get(allocation.mark))
        for mark, one in listed.items():
            # Its claim is no longer ours, and it cannot have been taken over: the worker that submitted it has died, or
            # has lost the claim.
            if one.is_pending and mark not in ours_before and self._folder.is_waiting(mark):
                self._unwanted.add(one.id)
        self._cancel({one.id for one in answer if not one.is_final})
        with self._guard:
            kept = self._active | self._own.keys()
        self._folder.tidy(kept)

    def _without_slurm(self, own: Sequence[Allocation]) -> None:
        """Do what can be done while Slurm does not answer: end the claims that must end. The fence keeps their
        allocations from beginning."""
        self.answers = False
        for allocation in own:
            if allocation.reason is not None and not allocation.ended:
                self._judge(allocation, None)
            elif allocation.refusal is not None:
                allocation.unanswered = True

    def _cancel(self, lasting: set[str]) -> None:
        """Cancel the unwanted ones of these ids. They stay unwanted until Slurm says that they have ended."""
        self._unwanted &= lasting
        if self._unwanted:
            try:
                self._client.cancel(self._unwanted)
            except CommandFailed as error:
                logger.info("some allocations could not be cancelled; they may have ended already: %s", error)

    def _submit(self, allocation: Allocation) -> bool:
        """Submit an allocation; returns False if sbatch failed. Then the look tells whether Slurm has it all the
        same."""
        allocation.slurm_id = None
        try:
            spec = parse_spec(allocation.claim.spec)
            file = self._folder.write(allocation.claim, spec.resources().nodes)
            allocation.submitted = True
            arguments = self._arguments(allocation, spec)
            allocation.slurm_id = self._client.submit(arguments, script(self._settings, file, spec.resources().nodes))
            logger.info("submitted as %s", allocation.slurm_id)
        except CommandFailed as error:
            logger.warning("%s", error)
            allocation.refusal, allocation.unanswered = str(error), isinstance(error, NoAnswer)
            return False
        except RunnerError as error:
            self._finish(allocation, error.code, str(error))
        except ValidationError:
            self._unreadable(allocation)
        except OSError as error:  # a full disk, or a folder that is gone
            reason = f"the folder for hand-over files cannot be used: {describe_error(error)}"
            self._give_back(allocation, Unfit("disk_full" if is_no_space(error) else "storage_failed", reason))
        return True

    def _arguments(self, allocation: Allocation, spec: SpecBase) -> list[str]:
        settings, claim, resources = self._settings, allocation.claim, spec.resources()
        chosen = of_cluster(settings)
        if claim.timeout_s is not None:
            chosen["time"] = str(math.ceil((claim.timeout_s + settings.start_s) / 60))
        with_gpus = settings.gpus_per_node > 0 and resources.device_type in ("cuda", "auto")
        if with_gpus:
            chosen["gres"] = gres(settings, resources.devices)
        alone = claim.exclusive_host or (not with_gpus and resources.device_type != "none")
        return [
            f"--job-name={allocation.name}",
            f"--comment={allocation.mark}",
            "--no-requeue",
            f"--nodes={resources.nodes}",
            "--ntasks-per-node=1",
            f"--chdir={self._folder.path}",
            f"--output={self._folder.output_of(allocation.mark)}",
            *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
            *(["--exclusive"] if alone else []),
            *settings.extra_arguments,
        ]

    def _judge(self, allocation: Allocation, listed: Listed | None) -> None:
        """Decide what becomes of a claim that was ours a moment ago."""
        with about(allocation.claim.job_id, allocation.claim.attempt):
            if listed is not None and (allocation.unanswered or allocation.refusal is None or not listed.is_final):
                allocation.slurm_id, allocation.refusal, allocation.unanswered = listed.id, None, False
            match allocation.reason:
                case Abandoned():
                    self._drop(allocation)
                case Cancelled():
                    self._end(allocation, lambda: self._queue.finish(allocation.claim, Finish("cancelled")))
                case GivenBack():  # after an error of the worker, too: the job has not begun
                    self._end(allocation, lambda: self._queue.give_back(allocation.claim))
                case None if allocation.unanswered:
                    allocation.submitted, allocation.refusal, allocation.unanswered = False, None, False
                    self._wanted.set()
                case None if allocation.slurm_id is None and allocation.refusal is not None:
                    self._refused(allocation, allocation.refusal)
                case None if allocation.submitted and (listed is None or listed.is_final):
                    self._never_began(allocation, listed)
                case None if allocation.submitted and listed is not None:
                    state = f"is pending: {listed.reason}" if listed.is_pending else "starts"
                    self._say(allocation, f"Slurm job {listed.id} {state}")

    def _refused(self, allocation: Allocation, words: str) -> None:
        """Deal with a claim that Slurm has not taken, although it answers: it goes back if Slurm would take no job now,
        and fails if Slurm refuses it twice. What fails once may be the host's."""
        claim = allocation.claim
        found = self.examine()
        if found is None and OF_LIMITS.search(words):
            found = Unfit("slurm_refused", words) if self._is_excused(claim) else None
        if found is not None:
            self._give_back(allocation, found)
            return
        try:
            self._client.test(self._arguments(allocation, parse_spec(claim.spec)))
        except NoAnswer:
            pass
        except CommandFailed as error:
            self._finish(allocation, "unsupported", f"Slurm refuses this job, and takes others: {error}")
            return
        self._try_again(allocation, words)

    def examine(self) -> Unfit | None:
        """Ask Slurm whether it would take the smallest job; return why not."""
        try:
            self._client.test(of_smallest(self._settings))
        except NoAnswer as error:
            return Unfit("slurm_silent", f"Slurm does not answer: {error}")
        except CommandFailed as error:
            return Unfit("slurm_refused", str(error))
        return None

    def _unreadable(self, allocation: Allocation) -> None:
        server = self._queue.server()
        if server is not None and server["fingerprint"] != fingerprint():
            self._give_back(allocation, of_another_version(server))
        else:
            self._finish(allocation, "unreadable", "its spec cannot be read")

    def _give_back(self, allocation: Allocation, unfit: Unfit, *, counts: bool = False) -> None:
        def give_back() -> None:
            if counts:
                self._queue.give_up(allocation.claim, unfit.reason)
            else:
                self._queue.give_back(allocation.claim)
            allocation.unfit = unfit  # not if its agent has taken it over

        self._end(allocation, give_back, unfit.reason)

    def _never_began(self, allocation: Allocation, listed: Listed | None) -> None:
        """Deal with a claim whose allocation has ended before its agent took it over, in whatever state.

        A job does nothing before that, so it cannot be its fault.
        """
        state = "it is gone from Slurm's queue" if listed is None else f"its state is {listed.state}"
        words = " ".join(self._folder.last_words(allocation.mark, LAST_WORDS_BYTES).split())
        said = f"its last words: {words}" if words else "it said nothing"
        self._try_again(
            allocation, f"Slurm job {allocation.slurm_id} ended before it began with the job; {state}; {said}"
        )

    def _try_again(self, allocation: Allocation, why: str) -> None:
        """Submit it again after a pause; after several tries the job goes back, and the worker is unfit. That costs an
        attempt once the job is no longer excused: it may be what no allocation can begin with."""
        failures = allocation.failures + 1
        excused = self._is_excused(allocation.claim)
        if failures == TRIES:
            self._give_back(allocation, Unfit("allocation_failed", why), counts=not excused)
        elif self._say(allocation, f"{why}; submitted again soon ({failures} of {TRIES} tries)"):
            logger.warning("submitting it again soon: %s", why)
            allocation.failures, allocation.submitted, allocation.refusal = failures, False, None
            allocation.not_before = time.monotonic() + PAUSE_S * 2 ** (failures - 1)

    def _is_excused(self, claim: Claim) -> bool:
        """Return True if what Slurm does to this job costs no attempt: for a while, so that the job ends some time."""
        now = time.monotonic()
        return now - self._excused_first.setdefault(claim.job_id, now) <= BLAMED_S

    def _say(self, allocation: Allocation, told: str) -> bool:
        """Let the job say what it waits for; returns False if its claim is no longer ours."""
        if told == allocation.told:
            return True
        try:
            self._queue.waits(allocation.claim, told)
            allocation.told = told
        except LeaseLost:
            self._drop(allocation)
            return False
        return True

    def _finish(self, allocation: Allocation, code: str, detail: str) -> None:
        finish = Finish("failed", job_problem(code, detail))
        self._end(allocation, lambda: self._queue.finish(allocation.claim, finish), detail)

    def _end(self, allocation: Allocation, write: Callable[[], object], why: str = "it must end") -> None:
        """End a claim, and its allocation with it: once the write has passed the fence, its agent cannot take over."""
        try:
            write()
        except LeaseLost:
            logger.debug("its agent has taken it over, or its claim was lost")
        else:
            logger.info("Slurm job not started: %s", why)
            if allocation.slurm_id is not None:
                self._unwanted.add(allocation.slurm_id)
        self._drop(allocation)

    def _drop(self, allocation: Allocation) -> None:
        allocation.succeeded = allocation.slurm_id is not None and not self._folder.is_waiting(allocation.mark)
        with self._guard:
            self._own.pop(allocation.mark, None)
            if allocation.slurm_id is not None:
                self._active.add(allocation.mark)  # until a look says otherwise
        allocation.done.set()
        self._on_end()


def of_cluster(settings: SlurmSettings) -> dict[str, str | None]:
    """Return the arguments of sbatch that are the same for all jobs."""
    return {"partition": settings.partition, "account": settings.account, "constraint": settings.constraint}


def gres(settings: SlurmSettings, gpus: int) -> str:
    """Return the argument of sbatch that asks for so many GPUs on each node."""
    return ":".join(["gpu", *filter(None, [settings.gpu_type]), str(gpus)])


def of_smallest(settings: SlurmSettings) -> list[str]:
    """Return the arguments of sbatch for the smallest job; it has a GPU if the nodes have some."""
    chosen = of_cluster(settings) | ({"gres": gres(settings, 1)} if settings.gpus_per_node else {})
    return [*(f"--{name}={value}" for name, value in chosen.items() if value), *settings.extra_arguments]


def script(settings: SlurmSettings, file: Path, nodes: int) -> str:
    """Return the batch script: one agent, or with several nodes one on each of them."""
    agent = shlex.join([*settings.container, *settings.command, "worker", "--one-job", str(file)])
    on_node = f"{settings.setup}\nexec {agent}\n"
    if nodes == 1:
        return f"#!/bin/bash\n{on_node}"
    # When the first agent has ended, srun ends the others.
    run = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--wait=1"]
    run += ["bash", "-c", on_node]
    return f"#!/bin/bash\nexec {shlex.join(run)}\n"
