"""The plan of a chaos run: which faults happen when, and what clients submit. All of it follows from the seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEASE_S = 3.0
"""Of the service under chaos, seconds."""


@dataclass(frozen=True)
class Fault:
    """One fault. Its victim is chosen when it happens: number `target` modulo the number of candidates."""

    at_s: float
    kind: str
    target: int
    lasts_s: float
    """Seconds until it is undone: a stopped process continues, a killed server or worker is started again."""
    amount: float = 0.0
    """Of `clock`: by how many hours the clock is off from now on."""

    def __str__(self) -> str:
        amount = f", {self.amount:+.1f} h" if self.kind == "clock" else ""
        return f"{self.at_s:6.2f} s  {self.kind} {self.target}, for {self.lasts_s:.2f} s{amount}"


LASTS_S: dict[str, tuple[float, float]] = {
    "kill_worker": (0.0, 1.0),
    "kill_worker_and_all_below": (0.0, 1.0),
    "end_worker": (0.0, 1.0),
    "stop_worker": (0.2, 2.0 * LEASE_S),
    "kill_warm_parent": (0.0, 0.0),
    "stop_warm_parent": (0.2, 2.0),
    "kill_keeper": (0.0, 0.0),
    "stop_keeper": (0.2, 3.0),
    "kill_job": (0.0, 0.0),
    "stop_job": (0.2, 3.0),
    "kill_server": (0.0, 1.0),
    "stop_server": (0.2, 3.0),
    "disk_full": (0.5, 3.0),
    "held_lock": (0.2, 1.5 * LEASE_S),
    "clock": (0.0, 0.0),
    "database_away": (0.5, 5.0),
    "kill_database": (0.0, 0.0),
    "store_away": (0.5, 5.0),
    "kill_controller": (0.5, 5.0),
    "kill_node": (0.5, 5.0),
    "kill_agent": (0.0, 0.0),
    "cancel_allocation": (0.0, 0.0),
}
"""Every kind of fault, with the least and the most that it lasts, in seconds."""
OF_SLURM = ("kill_controller", "kill_node", "kill_agent", "cancel_allocation")
OF_REMOTE = ("database_away", "kill_database", "store_away")
LOCAL = tuple(kind for kind in LASTS_S if kind not in OF_REMOTE + OF_SLURM)
REMOTE = (*(kind for kind in LOCAL if kind != "held_lock"), *OF_REMOTE)
SLURM = (*REMOTE, *OF_SLURM)
"""The kinds that can happen to each kind of service."""
OUTAGES = frozenset({"database_away", "store_away"})

SELDOM = frozenset(
    {"kill_worker", "kill_worker_and_all_below", "end_worker", "kill_server", "stop_server", "held_lock"}
)
"""Faults that come a third as often as others: while they last, little else happens that others could disturb."""


def faults(
    seed: int, seconds: float, kinds: Sequence[str] = LOCAL, *, per_s: float = 1.2, outage_s: float | None = None
) -> list[Fault]:
    """Return the faults of a run of this many seconds, by time: each kind at least once, if there is time, and then
    any. outage_s: each outage of a server happens once, and lasts as long."""
    rng = random.Random(f"faults {seed}")
    count = max(1, round(seconds * per_s))
    chosen = rng.sample(kinds, min(count, len(kinds)))
    again = [kind for kind in kinds if outage_s is None or kind not in OUTAGES] or kinds
    weights = [1 if kind in SELDOM else 3 for kind in again]
    chosen += rng.choices(again, weights, k=count - len(chosen))
    rng.shuffle(chosen)
    found = []
    for kind in chosen:
        lasts_s = rng.uniform(*LASTS_S[kind]) if outage_s is None or kind not in OUTAGES else outage_s
        at_s = rng.uniform(0.0, max(0.0, seconds - lasts_s))
        found.append(Fault(at_s, kind, rng.randrange(1000), lasts_s, amount=rng.uniform(-3.0, 3.0)))
    return sorted(found, key=lambda fault: fault.at_s)


Behaviours = Mapping[str, tuple[int, Mapping[str, Any]]]
BEHAVIOURS: Behaviours = {
    "stops_keeper": (2, {}),
    "daemon": (4, {}),
    "garbage": (6, {}),
    "ignores_sigterm": (3, {}),
    "sparse_artifact": (3, {"amount": 64}),
    "kills_keeper": (2, {}),
    "many_measurements": (3, {"amount": 2000}),
    "fork_bomb": (3, {"amount": 5}),
    "changing_artifact": (3, {"amount": 2}),
    "kills_agent": (1, {}),
    "output": (2, {"amount": 30}),
    "closes_pipes": (2, {}),
    "many_artifacts": (3, {"amount": 80}),
    "exits": (3, {}),
    "stolen_artifact": (2, {}),
    "hungry": (2, {"amount": 200}),
    "raises": (3, {}),
    "segfault": (2, {}),
    "good": (40, {}),
}
"""The behaviours of hostile jobs (tests/plugins/hostile_kind), with their weights and parameters. The first ones occur
in every run."""

SMALL = {name: value for name, value in BEHAVIOURS.items() if not value[1] and name != "kills_agent"}
"""Those that end no worker, and hand nothing large over: its memory stays flat."""

NEVER_SUCCEED = frozenset(BEHAVIOURS) - {
    "good",
    "many_measurements",
    "many_artifacts",
    "sparse_artifact",
    "changing_artifact",
    "output",
    "daemon",
    "fork_bomb",
}
ENDLESS = frozenset({"ignores_sigterm", "stolen_artifact", "garbage", "kills_keeper", "stops_keeper", "kills_agent"})
"""They may not end by themselves, so they get a timeout."""


KIND = "hostile"
BATCH = 4
"""Numbers of jobs with one label, by which they are cancelled and deleted together."""
UNIQUE_KEYS = 3
"""Different keys of jobs that have one."""


def batch_of(number: int) -> str:
    """The value of the label `batch` of job `number`."""
    return str(number // BATCH)


def job_body(rng: random.Random, number: int, behaviours: Behaviours = BEHAVIOURS) -> dict[str, Any]:
    """Return the body of job `number`, which its name and its labels contain. Every other number takes the next
    behaviour in turn."""
    names, weights = list(behaviours), [weight for weight, _ in behaviours.values()]
    behaviour = names[number // 2 % len(names)] if number % 2 else rng.choices(names, weights)[0]
    spec = {
        "kind": KIND,
        "behaviour": behaviour,
        "number": number,
        "seconds": round(rng.choice([0.0, 0.0, 0.2, 1.0]) * rng.random(), 3),
        "units": rng.choice([1, 1, 1, 2, 3]) if behaviour == "good" else 1,
        "start": rng.choice(["fork", "fork", "fork", "exec"]),
        "device": rng.choice(["none", "none", "cpu"]),
        **behaviours[behaviour][1],
    }
    body = {
        "spec": spec,
        "name": f"job {number}",
        "labels": {"number": str(number), "behaviour": behaviour, "batch": batch_of(number)},
        "priority": rng.randint(-2, 2),
        "max_attempts": 1 if behaviour == "kills_agent" else rng.randint(1, 3),
    }
    if behaviour in ENDLESS or rng.random() < 0.1:
        body["timeout_s"] = round(rng.uniform(0.5, 3.0), 3)
    if rng.random() < 0.2:
        body["unique_key"] = f"one of {rng.randrange(UNIQUE_KEYS)}"
    return body
