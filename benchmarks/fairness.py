"""How long the jobs of several users wait, in the order of fair shares and first in, first out.

    python -m benchmarks.fairness [--real] [--seed N]

It runs the queue itself, on a database of its own, with a clock that jumps from one end of a job to the next. With
--real, a server and a worker run jobs of three users with tokens on this host's CPU, too.
"""

from __future__ import annotations

import heapq
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import typer

from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import Database, open_database
from app.store.queue import sharing, submission, transitions
from app.store.queue.sharing import Policy, put_policy
from app.store.queue.transitions import Queue
from app.store.records import Claim, Finish, NewJob, Offer
from app.store.tokens import Tokens
from benchmarks._shared import TINY, Row, print_table
from flopwatch import Flopwatch
from flopwatch.text.times import parsed_time
from tools.service import Service

SPEC = spec_adapter.validate_python({**TINY, "device": "cuda"})
DAY_S = 86_400.0
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
STARTED: dict[str, int] = {"ada": 200, "bob": 20, "cyd": 1}
"""Jobs of each user in the real run, in the order in which they are submitted."""
ALL = 1000
ADMIN = "the admin's token"
ENVIRONMENT = {"FLOPWATCH_API_TOKEN": ADMIN}


@dataclass(frozen=True)
class Work:
    """One job: when it is submitted, and how long it runs, in seconds."""

    user: str
    at_s: float
    ran_s: float
    priority: int = 0


@dataclass(frozen=True)
class Scenario:
    name: str
    gpus: int
    jobs: Sequence[Work]
    most_devices: int | None = None
    shown: Sequence[str] = ()
    """The users whose times are printed; none: all."""


def burst(user: str, number: int, ran_s: float, at_s: float = 0.0, priority: int = 0) -> list[Work]:
    """Return so many equal jobs, submitted at once."""
    return [Work(user, at_s, ran_s, priority)] * number


def scenarios(rng: random.Random) -> Iterator[Scenario]:
    yield Scenario("1 job behind 200", 1, [*burst("ada", 200, 60), *burst("bob", 1, 60, at_s=1)])
    sizes = {"ada": 200, "bob": 100, "cyd": 50, "dan": 10, "eve": 1}
    mixed = [
        Work(user, at_s, rng.uniform(30, 300))
        for at_s, (user, number) in enumerate(sizes.items())
        for _ in range(number)
    ]
    yield Scenario("5 users, 4 GPUs, 30 to 300 s", 4, mixed)
    yield Scenario("the same work, cut in 200 or in 20", 1, [*burst("ada", 200, 30), *burst("bob", 20, 300, at_s=1)])
    everybody = [*burst("ada", 150, 60), *burst("bob", 20, 60, at_s=1), *burst("cyd", 20, 60, at_s=2)]
    yield Scenario("3 users, one with priority 0 and 5", 1, [*burst("ada", 50, 60, priority=5), *everybody])
    yield Scenario("the same below a ceiling of 0", 1, [*burst("ada", 50, 60), *everybody])
    half_life_s = Policy().half_life_s
    for others in (1, 4):
        before = [Work("ada", at_s, 300) for at_s in range(0, int(DAY_S), 300)]
        after = [
            Work(f"new{one}", DAY_S + at_s, 300)
            for one in range(others)
            for at_s in range(0, int(4 * half_life_s), 300)
        ]
        name = f"a day alone, then {others} {'others' if others > 1 else 'other'} without end"
        yield Scenario(name, 1, [*before, *after, Work("ada ", DAY_S + 1, 300)], shown=("ada ",))
    yield Scenario("at most 2 GPUs each", 4, [*burst("ada", 40, 60), *burst("bob", 4, 60, at_s=30)], 2)


def waits(scenario: Scenario, folder: Path, *, fair: bool) -> dict[str, list[float]]:
    """Return how long each job waited, in seconds, by user."""
    settings = Settings(data_dir=folder, database_url=None)
    now_s = 0.0

    def clock() -> datetime:
        return BEGIN + timedelta(seconds=now_s)

    with closing(open_database(settings)) as database, ExitStack() as stack:
        for module in (sharing, submission, transitions):
            stack.enter_context(mock.patch.object(module, "utc_now", clock))
        _set_up(database, Policy(most_devices=scenario.most_devices), fair=fair)
        queue, pending = Queue(database), sorted(scenario.jobs, key=lambda job: job.at_s)
        submitted: dict[int, Work] = {}
        waited: dict[str, list[float]] = {}
        running: list[tuple[float, int, Claim]] = []
        while pending or running or len(submitted) > sum(map(len, waited.values())):
            now_s = min([job.at_s for job in pending[:1]] + [running[0][0] for _ in running[:1]])
            while pending and pending[0].at_s <= now_s:
                job = pending.pop(0)
                new = NewJob(SPEC, submitted_by=job.user.strip(), priority=job.priority)
                submitted[queue.submit(new).response["id"]] = job
            while running and running[0][0] <= now_s:
                queue.finish(heapq.heappop(running)[2], Finish("succeeded"))
            while len(running) < scenario.gpus:
                free = scenario.gpus - len(running)
                offer = Offer(frozenset({SPEC.kind}), SPEC.requirements(), scenario.gpus, free, idle=not running)
                if (claim := queue.claim("worker", offer)) is None:
                    break
                job = submitted[claim.job_id]
                waited.setdefault(job.user, []).append(now_s - job.at_s)
                heapq.heappush(running, (now_s + job.ran_s, claim.job_id, claim))
        return waited


def _set_up(database: Database, policy: Policy, *, fair: bool) -> None:
    if fair:
        Tokens(database).create("ada", "submit", None)
    with database.write() as connection:
        put_policy(connection, policy)


def _rows(scenario: Scenario) -> Iterator[Row]:
    found: dict[bool, dict[str, list[float]]] = {}
    for fair in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found[fair] = waits(scenario, Path(folder), fair=fair)
    for user in scenario.shown or sorted(found[True]):
        yield _row(user.strip(), found[False][user], found[True][user])


def _row(user: str, fifo: Sequence[float], fair: Sequence[float]) -> Row:
    def text(values: Sequence[float]) -> str:
        return f"{statistics.mean(values) / 60:.1f} / {max(values) / 60:.1f}"

    return {"user": user, "jobs": str(len(fair)), "first in, first out": text(fifo), "fair shares": text(fair)}


def _measured(*, fair: bool) -> dict[str, list[float]]:
    """Submit the jobs of STARTED to a real server, one user's after the other's; returns how long they waited.

    Each user has a token, and the first has five; first in, first out is without tokens.
    """
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), ENVIRONMENT if fair else {}) as service:
        service.start_server()
        admin = Flopwatch(service.url, token=ADMIN if fair else None)
        for user, number in STARTED.items():
            clients = [admin]
            if fair:
                asked = {"name": user, "scope": "submit", "expires_days": 1}
                texts = [admin.send("POST", "/tokens", body=asked).json()["token"] for _ in range(5)]
                clients = [Flopwatch(service.url, token=text) for text in texts]
            for turn in range(number):
                clients[turn % len(clients)].submit(TINY, labels={"user": user})
        service.start_worker()
        waited: dict[str, list[float]] = {}
        for job in admin.list_jobs(limit=ALL):
            ended = admin.wait(job)
            started, created = (parsed_time(ended[name]) for name in ("started_at", "created_at"))
            waited.setdefault(ended["labels"]["user"], []).append((started - created).total_seconds())
        return waited


def main(real: bool = False, seed: int = 0) -> None:
    """Print the mean and the longest wait of each user's jobs, in minutes."""
    print(f"seed {seed}; minutes that jobs waited: mean / longest")
    for scenario in scenarios(random.Random(seed)):
        print_table(scenario.name, _rows(scenario))
    if real:
        fifo, fair = _measured(fair=False), _measured(fair=True)
        print_table("Real, on this host's CPU", (_row(user, fifo[user], fair[user]) for user in STARTED))


if __name__ == "__main__":
    typer.run(main)
