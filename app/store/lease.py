"""Leases: finds silent workers, on the watcher's own monotonic clock, so that no jump of a wall clock counts.

A worker renews its claims by raising counters in the database; the watcher sees counters, never times. A counter that
has stood still for a whole lease, while the watcher looked, belongs to a lost worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from app.store.queue import Queue
from app.store.registration import Registration

logger = logging.getLogger(__name__)

LONGEST_SPAN = 0.5
"""Fraction of a lease that a gap between two looks counts for at most; a watcher must look more than twice a lease.
"""

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
    """Finds attempts and workers that are silent for longer than `lease_s` seconds. Only one thread may use it."""

    def __init__(
        self,
        queue: Queue,
        registration: Registration,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._registration = registration
        self._lease_s = lease_s
        self._clock = clock
        self._last: float | None = None
        self._attempts: _Silence[int] = _Silence()
        self._workers: _Silence[str] = _Silence()

    def poll(self) -> list[int]:
        """Look once, and take the jobs of lost workers from them. Returns the ids of those jobs."""
        span_s = self._span()
        running = {attempt.attempt_id: attempt for attempt in self._queue.running()}
        beats = self._registration.worker_beats()
        self._last = self._clock()
        self._attempts.grow({attempt_id: attempt.beat for attempt_id, attempt in running.items()}, span_s)
        self._workers.grow(beats, span_s)
        for worker_id in self._workers.longer_than(self._lease_s):
            if self._registration.lose_worker(worker_id, beats[worker_id]):
                logger.warning("worker %s is lost: silent for longer than %g s", worker_id, self._lease_s)
        recovered = []
        for attempt_id in self._attempts.longer_than(self._lease_s):
            attempt = running[attempt_id]
            state = self._queue.recover(attempt)
            if state is not None:
                logger.warning("attempt %d of job %d is lost: now %s", attempt.attempt, attempt.job_id, state)
                recovered.append(attempt.job_id)
        return recovered

    def _span(self) -> float:
        # A counter that did not change has stood still at least from the end of the last look to the start of this one.
        # If the watcher itself was stopped, it did not see the workers meanwhile, and they may have been stopped with
        # it.
        if self._last is None:
            return 0.0
        return min(self._clock() - self._last, self._lease_s * LONGEST_SPAN)
