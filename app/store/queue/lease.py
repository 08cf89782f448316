"""Leases: takes jobs from silent workers, by the watcher's own monotonic clock, so that no jump of a wall clock counts.

A worker renews its claims several times a lease with Queue.renew (transitions.py, fence.py), which raises counters in
the database. The server and each worker have a watcher, which sees counters, never times. A counter that has stood
still for a whole lease, while the watcher looked, belongs to a lost worker.

A worker that cannot commit is not lost. So each look begins with a commit of the watcher's own. If that commit fails,
the time since the previous look says nothing about the workers; if it has to wait, the waiting time does not count.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from app.errors import STORE_UNAVAILABLE, CannotRunHere
from app.logs import about
from app.settings import Settings
from app.store import service_settings
from app.store.database.engine import Database
from app.store.queue.registration import Registration, living_workers
from app.store.queue.transitions import Queue

logger = logging.getLogger(__name__)

LONGEST_SPAN = 0.5
"""Fraction of a lease that a gap between two looks counts for at most; a watcher must look more than twice a lease."""

Key = TypeVar("Key", bound=Hashable)


class _Silence(Generic[Key]):
    """The time for which each counter has stood still, in seconds during which the watcher looked."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[int, float]] = {}

    def grow(self, beats: Mapping[Key, int], span_s: float) -> None:
        """Take the counters' present values, `span_s` after the last call; forget counters that are gone."""
        self._seen = {
            key: (beat, self._seen[key][1] + span_s if key in self._seen and self._seen[key][0] == beat else 0.0)
            for key, beat in beats.items()
        }

    def longer_than(self, limit_s: float) -> list[Key]:
        return [key for key, (_beat, silent_s) in self._seen.items() if silent_s > limit_s]


class Watcher:
    """Finds attempts and workers that are silent for longer than the lease. Only one thread may use it.

    `lease_s` is the lease in seconds, as long as the database has none of its own; each look asks it again.
    """

    def __init__(
        self, queue: Queue, registration: Registration, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._registration = registration
        self.lease_s = lease_s
        self._clock = clock
        self._last: float | None = None
        self._attempts: _Silence[int] = _Silence()
        self._workers: _Silence[str] = _Silence()

    def poll(self) -> list[int]:
        """Look once, and take the jobs of lost workers from them; returns their ids. Raises one of STORE_UNAVAILABLE if
        the watcher could not commit: then nobody else could, and no worker counts as silent."""
        probed_at = self._clock()
        # A counter that did not change has stood still at least from the end of the last look to the start of this one.
        # If the watcher itself was stopped, it did not see the workers meanwhile, and they may have been stopped with
        # it.
        span_s = 0.0 if self._last is None else min(probed_at - self._last, self.lease_s * LONGEST_SPAN)
        try:
            self._queue.probe()
        except STORE_UNAVAILABLE:
            self.skip()
            raise
        # Others may have waited as long as the watcher, and before it.
        span_s = max(0.0, span_s - (self._clock() - probed_at))
        self.lease_s = self._queue.lease_s() or self.lease_s
        running = {attempt.attempt_id: attempt for attempt in self._queue.running()}
        beats = self._registration.worker_beats()
        self._last = self._clock()
        self._attempts.grow({attempt_id: attempt.beat for attempt_id, attempt in running.items()}, span_s)
        self._workers.grow(beats, span_s)
        for worker_id in self._workers.longer_than(self.lease_s):
            if self._registration.lose_worker(worker_id, beats[worker_id]):
                logger.warning("worker %s is lost: silent for longer than %g s", worker_id, self.lease_s)
        recovered = []
        for attempt_id in self._attempts.longer_than(self.lease_s):
            attempt = running[attempt_id]
            state = self._queue.recover(attempt)
            if state is not None:
                with about(attempt.job_id, attempt.attempt):
                    logger.warning("the attempt is lost: its job is %s now", state)
                recovered.append(attempt.job_id)
        self._queue.delete_abandoned_results()
        return recovered

    def skip(self) -> None:
        """Let the time since the last look count for nothing: the caller could not commit in it."""
        if self._last is not None:
            self._last = self._clock()


def with_agreed_lease(database: Database, settings: Settings) -> Settings:
    """Return the settings with the lease of this database, which the first process that opens it decides. One that
    starts with another FLOPWATCH_LEASE_S changes it, while no worker runs.

    Raises CannotRunHere while one does: with two leases, a worker that renews its claims by the longer one loses
    healthy jobs by the shorter.
    """
    lease_s = service_settings.agreed(database, service_settings.LEASE_S, service_settings.lease_s, settings.lease_s)
    if "lease_s" not in settings.model_fields_set or settings.lease_s == lease_s:
        return settings.model_copy(update={"lease_s": lease_s})
    with database.write() as connection:
        if living := living_workers(connection):
            more = f" and {len(living) - 3} more" if len(living) > 3 else ""
            raise CannotRunHere(
                f"FLOPWATCH_LEASE_S is {settings.lease_s:g}, but the lease of this database is {lease_s:g} seconds, "
                f"for server and workers alike: unset FLOPWATCH_LEASE_S or set it to {lease_s:g}; or stop "
                f"{', '.join(living[:3])}{more} first. A worker that was killed on another host counts until it was "
                "silent for a whole lease."
            )
        service_settings.put(connection, service_settings.LEASE_S, settings.lease_s)
    logger.warning("the lease of %s is %g s now, and was %g", database.backend.place, settings.lease_s, lease_s)
    return settings
