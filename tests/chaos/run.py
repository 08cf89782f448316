"""One chaos run: start a service, attack it, let it come to rest, and look for what is wrong."""

import re
import sqlite3
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.chaos import invariants
from tests.chaos.clients import Clients
from tests.chaos.evidence import Evidence, Ledger, read_marks
from tests.chaos.plan import BEHAVIOURS, Behaviours, Fault
from tests.chaos.site import Site, logs_of
from tools.service import FINAL_STATES, Service
from tools.waiting import wait_until

REST_S = 180.0
"""Seconds within which all jobs must end after the last fault."""
MEMORY_BYTES = 600 << 20
"""Most memory in bytes that the server or an agent may take, with the tests' modules, since it is a fork of them."""
GROWTH_BYTES, STEADY_S = 32 << 20, 1200
"""Largest growth of a process that ran for so many seconds or longer."""
SLACK_FILES = 40
"""Descriptors that a member may have open at the end beyond those at its start: connections to the database, kept."""
AGAIN = re.compile(r"job=(\d+) attempt=\d+ queued again, since its failure was this host's")
"""What a worker logs that has blamed itself: three different jobs failed alike, as hostile ones do now and then."""
TIDY_S = 20.0
POLL_S = 0.02


@dataclass
class Result:
    """The result of a run."""

    wrong: list[str]
    summary: dict[str, Any] = field(default_factory=dict)


def run(
    folder: Path,
    seed: int,
    seconds: float,
    plan: Sequence[Fault],
    *,
    workers: int = 3,
    stores: str = "local",
    stale: int = 0,
    behaviours: Behaviours = BEHAVIOURS,
    service: type[Service] = Service,
    say: Callable[[str], None] = print,
) -> Result:
    """Attack a service in `folder` for so many seconds; `workers`, `stores`, `stale` and `service` as Site has them.

    behaviours: those of the jobs, with their weights and parameters.
    """
    ledger, began = Ledger(), time.monotonic()

    def tell(what: str) -> None:
        say(f"after {time.monotonic() - began:.1f} s: {what}")

    with Site(folder, workers, stores, stale, service) as site:
        with Clients(site.service.url, seed, ledger, behaviours) as clients, watch(site, ledger):
            tell("it runs, and is attacked")
            attack(site, seconds, plan, say)
            site.undo_all()
            tell("the attack is over")
            site.wait_until_up()
            tell("server and workers are up")
            clients.settle()
            tell("clients have all their answers")
            wrong = come_to_rest(site, ledger)
        site.wait_until_up()  # the last job may have killed its agent
        tell("it has come to rest")
        wrong += [*site.unexpected, *api_and_database_agree(site), *site.files_left_open(SLACK_FILES)]
        wrong += site.stop_workers()
        tell("the workers have ended")
        site.stores.remove_unreferenced()
        wrong += invariants.check(gather(site, ledger))
        site.service.stop()
        wrong += server_log_is_clean(site) + memory_is_bounded(site)
        return Result(wrong, summary(site, ledger))


def attack(site: Site, seconds: float, plan: Sequence[Fault], say: Callable[[str], None]) -> None:
    """Cause the faults of the plan at their times."""
    began, left = time.monotonic(), list(plan)
    while (now := time.monotonic() - began) < seconds or left:
        site.tick()
        while left and left[0].at_s <= now:
            fault = left.pop(0)
            say(str(fault))
            site.strike(fault)
        time.sleep(POLL_S)


@contextmanager
def watch(site: Site, ledger: Ledger) -> Iterator[None]:
    """Look continuously: no job may have two running attempts, and those that a worker queues again are retried."""
    stop = threading.Event()

    def look() -> None:
        seen: set[int] = set()
        while not stop.wait(0.2):
            for job_id, times in site.stores.ask(
                "SELECT job_id, count(*) FROM attempt WHERE state = 'running' GROUP BY job_id HAVING count(*) > 1"
            ):
                if job_id not in seen:
                    ledger.trouble(f"job {job_id} ran {times} times at the same time")
                    seen.add(job_id)
            note_excused(site, ledger)

    thread = threading.Thread(target=look, name="watch")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        note_excused(site, ledger)


def note_excused(site: Site, ledger: Ledger) -> None:
    """Note the failed jobs that workers have queued again."""
    again = {int(job) for text in logs_of(site.service.folder, "worker").values() for job in AGAIN.findall(text)}
    with ledger.guard:
        ledger.retried |= again


def come_to_rest(site: Site, ledger: Ledger) -> list[str]:
    """Wait for the end of all jobs; returns those that do not end."""
    unfinished = "SELECT id, state, attempt, json_extract(spec, '$.behaviour') FROM job WHERE state NOT IN" + str(
        tuple(sorted(FINAL_STATES))
    )

    def at_rest() -> bool:
        site.tick()
        return not site.stores.ask(unfinished)

    def tidy() -> bool:
        evidence = Evidence(site.stores.ask, ledger, [], {}, [])
        # Each worker has a folder, which is empty in the end.
        left = [one for one in map(Path, site.leftovers()) if one.is_file() or any(one.rglob("*"))]
        return not [*invariants.results_are_of_attempts_that_ended_the_job(evidence), *left]

    try:
        wait_until(at_rest, timeout_s=REST_S, what="all jobs to end", poll_s=0.2)
    except TimeoutError:
        return [f"job {row[0]} has not ended in {REST_S:g} s: {row}" for row in site.stores.ask(unfinished)]
    with suppress(TimeoutError):  # what a lost attempt has left where nobody sees it may be removed a little later
        wait_until(tidy, timeout_s=TIDY_S, what="results of lost attempts to be removed", poll_s=0.2)
    return []


def api_and_database_agree(site: Site) -> list[str]:
    """Return the contradictions between the API and the database about jobs."""
    with httpx.Client(base_url=site.service.url, timeout=60.0, trust_env=False) as client:
        told = {job["id"]: job for job in _all_jobs(client)}
        rows = site.stores.ask("SELECT id, state, attempt, worker_id, name, kind FROM job")
        found = [] if told.keys() == {row[0] for row in rows} else [f"the API lists {len(told)} jobs of {len(rows)}"]
        for job_id, *stored in rows:
            job = told.get(job_id, {})
            if [job.get(name) for name in ("state", "attempt", "worker_id", "name", "kind")] != stored:
                found.append(f"job {job_id} is {stored}, told is {job}")
        for sweep in client.get("/sweeps", params={"limit": 500}).raise_for_status().json()["data"]:
            counts = dict(
                site.stores.ask(f"SELECT state, count(*) FROM job WHERE sweep_id = {sweep['id']} GROUP BY state")
            )
            if {state: number for state, number in sweep["counts"].items() if number} != counts:
                found.append(f"sweep {sweep['id']} has {counts}, told is {sweep['counts']}")
        metrics = client.get("/metrics").raise_for_status().text
        for state, number in Counter(row[1] for row in rows).items():
            if f'flopwatch_jobs{{state="{state}"}} {number}' not in metrics:
                found.append(f"/metrics does not tell of {number} jobs that have {state}")
    return found


def _all_jobs(client: httpx.Client) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        page = client.get("/jobs", params={"limit": "500", **after}).raise_for_status().json()
        yield from page["data"]
        if page["next"] is None:
            return
        after = {"after": page["next"]}


def gather(site: Site, ledger: Ledger) -> Evidence:
    """Collect the evidence to judge."""
    marks = read_marks(site.folder / "marks")
    return Evidence(site.stores.ask, ledger, marks, site.stores.files(), site.leftovers())


def server_log_is_clean(site: Site) -> list[str]:
    """Return the tracebacks in the server's output, but not those of servers that could not start."""
    return [
        f"{name} has a traceback: …{text[max(0, at - 500) : at + 3000]}"
        for name, text in logs_of(site.service.folder, "server").items()
        if (at := text.find("Traceback (most recent call last)")) >= 0 and "startup failed" not in text
    ]


def memory_is_bounded(site: Site) -> list[str]:
    """Return the members that have taken too much memory, or ever more."""
    return [
        f"{member.name} took {member.peak_bytes >> 20} MiB, and grew by {growth(member.sizes) >> 20} MiB"
        for member in site.members
        if member.peak_bytes > MEMORY_BYTES or growth(member.sizes) > GROWTH_BYTES
    ]


def growth(sizes: Sequence[int]) -> int:
    """Return the median of the last third less that of the first third after the warm-up, which is a tenth. Bytes; 0 of
    a process that did not run for long."""
    warm = sizes[len(sizes) // 10 :]
    third = len(warm) // 3
    long = len(sizes) >= STEADY_S
    return int(statistics.median(warm[-third:]) - statistics.median(warm[:third])) if long else 0


def summary(site: Site, ledger: Ledger) -> dict[str, Any]:
    """Return the numbers that describe the run."""
    try:
        states = dict(site.stores.ask("SELECT state, count(*) FROM job GROUP BY state"))
        attempts = dict(site.stores.ask("SELECT state, count(*) FROM attempt GROUP BY state"))
        codes = dict(site.stores.ask("SELECT json_extract(error, '$.code'), count(*) FROM job GROUP BY 1"))
    except sqlite3.Error as error:
        return {"database": str(error)}
    return {
        "jobs": states,
        "attempts": attempts,
        "errors": codes,
        "units": dict(Counter(mark["mark"] for mark in read_marks(site.folder / "marks"))),
        "deleted": len(ledger.deleted),
        "refused": len(ledger.refused),
        "acts": dict(sorted(ledger.acts.items())),
        "answers": dict(sorted(ledger.answers.items())),
        "peak_mib": {member.name: member.peak_bytes >> 20 for member in site.members},
        "growth_mib": {member.name: growth(member.sizes) >> 20 for member in site.members},
        "faults": dict(sorted(site.struck.items())),
        "starts": len(site.service.processes),
    }
