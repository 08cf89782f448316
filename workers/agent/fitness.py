"""A worker's fitness: whether it may claim. All causes come here for which jobs would fail without fault.

A run or a check finds that the worker is unfit, and why. Then it claims nothing, and the job goes back uncounted. After
a while, which doubles up to a minute as long as no job succeeds, the worker is examined: it is fit if what it
needs works again. Of some causes only a job can tell whether they are gone; then the next one does.
"""

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from app.errors import STORE_UNAVAILABLE
from app.specs._code import codes_of
from app.specs._schema import SCHEMA
from app.store.public import rfc3339
from app.store.records import Claim
from app.store.tables import utc_now
from flopwatch.version import own_version
from workers.devices.locks import HeldDevices
from workers.outcome import Failed, describe_error

logger = logging.getLogger(__name__)

UnfitCode = Literal[
    "allocation_failed",
    "device_lost",
    "disk_full",
    "driver_silent",
    "exhausted",
    "leftovers",
    "package_missing",
    "same_failures",
    "slurm_refused",
    "slurm_silent",
    "storage_failed",
    "store_unreachable",
    "too_new",
    "too_old",
]
"""Codes of the causes; docs/failures.md has them."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
TOLD_BY_JOBS: frozenset[UnfitCode] = frozenset({"allocation_failed", "exhausted", "leftovers", "same_failures"})
"""Codes of causes that no examination sees."""
SAME = 3
"""Number of different jobs that fail the same way, with no other end between them, which mean the host."""
BLAMED_S = 600.0
"""Seconds for which such failures are blamed on the host, and for which one job is excused: after that they are the
jobs', so that many wrong jobs keep the others waiting no longer, and a job that harms its neighbours ends."""
_OF_HOSTS = frozenset({"crashed", "invalid_environment", "storage_full"})
"""Codes of failures that a host can cause. An error that the job's code raised is not among them."""
_OF_DEVICES = re.compile(
    r"CUDA error(?!: (an illegal|misaligned|device-side|invalid (argument|config|address|program)|too many resources))"
    r"|CUDA driver|CUDA-capable device|cu(DNN|BLAS|SPARSE|FFT)\w* error|CU(DNN|BLAS)_STATUS|NVML|NVIDIA driver"
    r"|NCCL error|GPU is lost|sees no GPU|^ImportError|^OSError: .*\.so",
    re.IGNORECASE,
)
"""Texts of errors of the host that reach the job as errors of its code; not those of a wrong kernel or index."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+|/\S+", re.IGNORECASE)


@dataclass(frozen=True)
class Unfit:
    """Why a worker claims nothing."""

    code: UnfitCode
    reason: str
    for_good: bool = False
    """True if only another start of the worker can help."""


@dataclass(frozen=True)
class Judge:
    """What a run asks about a failed job before it is recorded."""

    check_host: Callable[[HeldDevices, int], Unfit | None] = lambda _devices, _room: None
    """Looks at the host, with the job's devices, as if so many bytes more were free; returns why it is unfit."""
    blame: Callable[[Claim, Failed], Unfit | None] = lambda _claim, _failure: None
    """`Fitness.blame`."""
    unfit_counts: bool = False
    """True if the attempt counts of a job that goes back since the host is unfit: another would get it at once."""


def may_be_the_hosts(failure: Failed) -> bool:
    return failure.code in _OF_HOSTS or _OF_DEVICES.search(failure.detail) is not None


def _origin(claim: Claim) -> object:
    if any(codes_of(claim.spec)):
        return "uploaded code"
    return json.dumps(claim.spec, sort_keys=True) if claim.sweep_id is None else claim.sweep_id


class Fitness:
    """Knows whether one worker is fit. Threads of runs may ask `blame`; the rest is for the worker's own thread.

    `clock` returns the time in seconds, from any beginning; `has_several_users`, whether several users submit jobs.
    """

    def __init__(self, clock: Callable[[], float], has_several_users: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self._has_several_users = has_several_users
        self._guard = threading.Lock()
        self.unfit: Unfit | None = None
        self._since = utc_now()
        self._next_try = 0.0
        self._backoff_s = MIN_BACKOFF_S
        self._alike: dict[object, Claim] = {}
        """Claims of different origins that failed alike, one after the other."""
        self._way = ""
        """How they failed."""
        self._excused: list[Claim] = []
        """Claims of the others, which have failed without fault."""
        self._began: float | None = None
        """When the host was blamed first, since a job has succeeded."""
        self._blamed_since: dict[int, float] = {}
        """When the host was blamed first for a failure of this job, whatever succeeded since."""

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next_try

    @property
    def is_told_by_jobs(self) -> bool:
        return self.unfit is not None and self.unfit.code in TOLD_BY_JOBS

    @property
    def is_for_good(self) -> bool:
        """Return True if nothing but another start can make the worker fit."""
        return self.unfit is not None and self.unfit.for_good

    def lose(self, unfit: Unfit) -> None:
        """Take note that the worker is unfit, or still is."""
        if self.is_for_good:
            return
        self._since = utc_now() if self.unfit is None else self._since
        if self.unfit is None or self.unfit.code != unfit.code:
            logger.warning("unfit, claiming nothing: %s (%s)", unfit.reason, unfit.code)
        self.unfit = unfit
        self._next_try = math.inf if unfit.for_good else self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def regain(self) -> None:
        """Take note that the worker is fit, as far as an examination can tell."""
        if self.unfit is not None:
            logger.info("fit again, after: %s", self.unfit.reason)
        self.unfit = None

    def ran_well(self) -> None:
        """Take note that a job has succeeded: the next try is due."""
        self._backoff_s = MIN_BACKOFF_S
        if not self.is_for_good:
            self._next_try = self._clock()
        with self._guard:
            self._alike, self._way, self._began = {}, "", None

    def blame(self, claim: Claim, failure: Failed) -> Unfit | None:
        """Blame the host for a failure if different jobs fail alike; None if it is the job's, as far as one can tell.

        A sweep and equal specs count as one job, and so does all uploaded code, of which each version may have the
        mistake of the one before. Where there are several users, one alone cannot stop the worker: another's job must
        have failed alike, too.
        """
        words = failure.detail.partition("\n")[0]
        way = f"{failure.code}: {_VARIES.sub('#', words)}"
        with self._guard:
            if way != self._way:
                self._alike, self._way, self._began = {}, way, None
            if not may_be_the_hosts(failure):
                return None
            self._alike.setdefault(_origin(claim), claim)
            if self._began is None and (len(self._alike) < SAME or self._are_of_one_among_several()):
                return None
            now = self._clock()
            self._began = now if self._began is None else self._began
            others = [one for one in self._alike.values() if one.job_id != claim.job_id]
            self._alike = {}
            if now - self._began > BLAMED_S:
                return None
            self._excused += [one for one in others if self._is_excused(one, now)]
            if not self._is_excused(claim, now):
                return None
            return Unfit("same_failures", f"{SAME} different jobs failed the same way: {failure.code}: {words}")

    def _are_of_one_among_several(self) -> bool:
        if len({claim.submitted_by for claim in self._alike.values()}) > 1:
            return False
        try:
            if not self._has_several_users():
                return False
        except STORE_UNAVAILABLE:
            return False
        del self._alike[next(iter(self._alike))]  # as many as may be excused are kept
        return True

    def _is_excused(self, claim: Claim, now: float) -> bool:
        return now - self._blamed_since.setdefault(claim.job_id, now) <= BLAMED_S

    def excused(self, running: Container[int]) -> list[Claim]:
        """Return the claims that failed without fault, except those whose attempts are in `running`."""
        with self._guard:
            return [one for one in self._excused if one.attempt_id not in running]

    def forget(self, claim: Claim) -> None:
        """Take note that the job of an excused claim is queued again, or cannot be."""
        with self._guard:
            self._excused.remove(claim)

    def as_json(self) -> dict[str, Any] | None:
        """Return what the worker's row has of it."""
        if self.unfit is None:
            return None
        left_s = max(0.0, self._next_try - self._clock())
        next_try = None if math.isinf(left_s) else utc_now() + timedelta(seconds=left_s)
        said = {"code": self.unfit.code, "reason": self.unfit.reason, "since": rfc3339(self._since)}
        return {**said, "next_try_at": rfc3339(next_try)}


class Examination:
    """Finds out in a thread of its own whether a worker is fit: what `examine` looks at may hang.

    `done` is called at the end; `examine` returns why the worker is still unfit.
    """

    def __init__(self, examine: Callable[[], Unfit | None], done: Callable[[], None]) -> None:
        self._examine = examine
        self._done = done
        self.found: Unfit | None = None
        """Why the worker is unfit, once it is done."""
        # A daemon: the process can end while a driver hangs.
        self._thread = threading.Thread(target=self._run, name="examination", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found = self._examine()
        except Exception as error:
            logger.exception("the worker's fitness cannot be examined")
            self.found = Unfit("exhausted", f"its fitness cannot be examined: {describe_error(error)}")
        finally:
            self._done()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()


def of_another_version(server: Mapping[str, Any]) -> Unfit:
    """Return why a worker is unfit whose specs are not those of the newest server."""
    own = own_version()
    if server["schema_number"] < SCHEMA:
        reason = f"the server ({server['version']}) is older than this worker ({own}): update the server"
        return Unfit("too_new", reason, for_good=True)
    reason = f"the server ({server['version']}) is newer than this worker ({own}): update it, and start it again"
    return Unfit("too_old", reason, for_good=True)
