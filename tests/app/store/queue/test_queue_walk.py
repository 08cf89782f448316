"""The state machine against a model of it: a long random walk of everything that clients, workers and watchers do."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.errors import Conflict, LeaseLost, job_problem
from app.states import FINISHED_STATES
from app.store.database.engine import Database
from app.store.keeping.deleting import delete_job
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish, NewEvent, RunningAttempt

STEPS = 250


@dataclass
class Expected:
    """What a job must look like."""

    priority: int
    max_attempts: int
    state: str = "queued"
    attempt: int = 0
    cancel_requested: bool = False
    attempts: list[str] = field(default_factory=list)
    times_done: int = 0
    holder: Claim | None = None


class Walk:
    """Takes random steps and keeps the model in step."""

    def __init__(self, rng: random.Random, shop: Any, database: Database) -> None:
        self.rng, self.shop, self.database = rng, shop, database
        self.queue: Queue = shop.queue
        self.jobs: dict[int, Expected] = {}
        self.claims: list[Claim] = []
        self.seen: list[RunningAttempt] = []
        self.ended: dict[int, str] = {}
        """How attempts ended with results or without, by their ids."""
        self.taken: Counter[str] = Counter()

    def step(self) -> None:
        steps = {
            self.submit: 4,
            self.claim: 5,
            self.renew: 2,
            self.report: 2,
            self.finish: 4,
            self.give_back: 2,
            self.give_up: 1,
            self.cancel: 2,
            self.look: 2,
            self.recover: 3,
            self.delete: 1,
            self.retry: 2,
        }
        chosen = self.rng.choices(list(steps), weights=list(steps.values()))[0]
        self.taken[chosen.__name__] += 1
        chosen()

    def submit(self) -> None:
        priority, max_attempts = self.rng.randint(-2, 2), self.rng.randint(1, 3)
        self.jobs[self.shop.submit(priority=priority, max_attempts=max_attempts)] = Expected(priority, max_attempts)

    def claim(self) -> None:
        claim = self.shop.try_claim(f"worker-{self.rng.randint(1, 3)}")
        waiting = [(-job.priority, job_id) for job_id, job in self.jobs.items() if job.state == "queued"]
        if not waiting:
            assert claim is None
            return
        assert claim.job_id == min(waiting)[1]
        job = self.jobs[claim.job_id]
        job.state, job.attempt, job.holder = "running", job.attempt + 1, claim
        job.attempts.append("running")
        assert claim.attempt == job.attempt
        self.claims.append(claim)

    def fenced(self, write: Any, *, again: bool = False) -> tuple[Expected, Any] | None:
        """Do it with any claim ever made: it must work for exactly those that still run.

        again: a worker that has ended its attempt is told once more how.
        """
        if not self.claims:
            return None
        claim = self.rng.choice(self.claims[-12:])
        job = self.jobs.get(claim.job_id)
        if job is None or job.holder is not claim:
            if again and job is not None and claim.attempt_id in self.ended:
                assert write(claim) == self.ended[claim.attempt_id]
            else:
                with pytest.raises(LeaseLost):
                    write(claim)
            return None
        return job, write(claim)

    def end(self, job: Expected, state: str, attempt: str) -> None:
        if attempt in FINISHED_STATES and job.holder is not None:
            self.ended[job.holder.attempt_id] = attempt
        job.state, job.holder, job.attempts[-1] = state, None, attempt
        job.times_done += state != "queued"

    def report(self) -> None:
        self.fenced(lambda claim: self.queue.report(claim, [NewEvent("log", {"text": "."})]))

    def finish(self) -> None:
        error = job_problem("crashed", "signal 11")
        finish = self.rng.choice([Finish("succeeded"), Finish("failed", error=error), Finish("cancelled")])
        if done := self.fenced(lambda claim: self.queue.finish(claim, finish), again=True):
            job, state = done
            assert state == ("cancelled" if job.cancel_requested else finish.state)
            self.end(job, state, state)

    def give_back(self) -> None:
        if done := self.fenced(self.queue.give_back):
            job, _ = done
            if job.cancel_requested:
                self.end(job, "cancelled", "cancelled")
            else:
                self.end(job, "queued", "given_back")
                job.attempt -= 1

    def give_up(self) -> None:
        if done := self.fenced(lambda claim: self.queue.give_up(claim, "no threads")):
            job, state = done
            may_run_again = job.attempt < job.max_attempts
            assert state == ("cancelled" if job.cancel_requested else "queued" if may_run_again else "failed")
            self.end(job, state, "lost")

    def renew(self) -> None:
        claims = self.rng.sample(self.claims, min(len(self.claims), 4))
        held = [claim for claim in claims if (job := self.jobs.get(claim.job_id)) and job.holder is claim]
        renewal = self.queue.renew(claims)
        assert renewal.lost == {claim.attempt_id for claim in claims} - {claim.attempt_id for claim in held}
        assert renewal.cancel_requested == {c.job_id for c in held if self.jobs[c.job_id].cancel_requested}

    def cancel(self) -> None:
        if not self.jobs:
            return
        job_id, job = self.rng.choice(list(self.jobs.items()))
        if job.state in ("succeeded", "failed"):
            with pytest.raises(Conflict):
                self.queue.cancel(job_id)
            return
        self.queue.cancel(job_id)
        job.cancel_requested |= job.state != "cancelled"
        if job.state == "queued":
            job.state = "cancelled"
            job.times_done += 1

    def look(self) -> None:
        self.seen = self.queue.running()
        held = {job.holder.attempt_id for job in self.jobs.values() if job.holder}
        assert {running.attempt_id for running in self.seen} == held

    def recover(self) -> None:
        if not self.seen:
            return
        seen = self.rng.choice(self.seen)
        now = {running.attempt_id: running.beat for running in self.queue.running()}
        state = self.queue.recover(seen)
        if now.get(seen.attempt_id) != seen.beat:
            assert state is None
            return
        job = self.jobs[seen.job_id]
        retried = "queued" if job.attempt < job.max_attempts else "failed"
        expected = "cancelled" if job.cancel_requested else retried
        assert state == expected
        self.end(job, expected, "lost")

    def delete(self) -> None:
        if not self.jobs:
            return
        job_id, job = self.rng.choice(list(self.jobs.items()))
        if job.state in ("queued", "running"):
            with pytest.raises(Conflict):
                delete_job(self.database, job_id)
        else:
            delete_job(self.database, job_id)
            del self.jobs[job_id]

    def retry(self) -> None:
        if not self.jobs:
            return
        job_id, job = self.rng.choice(list(self.jobs.items()))
        if job.state not in ("failed", "cancelled"):
            with pytest.raises(Conflict):
                self.queue.retry(job_id)
            return
        self.queue.retry(job_id)
        job.state, job.cancel_requested = "queued", False
        job.max_attempts = max(job.max_attempts, job.attempt + 1)


def test_every_step_does_what_the_model_says(rng, shop, reading, database) -> None:
    walk = Walk(rng, shop, database)
    for number in range(STEPS):
        walk.step()
        if number % 20 and number != STEPS - 1:
            continue
        found, following = reading.jobs(limit=1000)
        assert following is None
        assert {job["id"]: job["state"] for job in found} == {id_: job.state for id_, job in walk.jobs.items()}
        for job in found:
            expected = walk.jobs[job["id"]]
            assert job["attempt"] == expected.attempt <= expected.max_attempts
            assert (job["cancel_requested_at"] is not None) == expected.cancel_requested
            assert (job["error"] is not None) == (job["state"] in ("failed", "cancelled"))
            assert (job["finished_at"] is not None) == (job["state"] in ("succeeded", "failed", "cancelled"))
            assert [attempt["state"] for attempt in reading.attempts(job["id"])] == expected.attempts
            done = [event for event in reading.events(job["id"]) if event["type"] == "done"]
            assert len(done) == expected.times_done
            assert job["max_attempts"] == expected.max_attempts
    assert len(walk.taken) == 12, f"the walk left steps out: {walk.taken}"
