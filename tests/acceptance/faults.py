"""What the fault tests share: many clients at once, what is wrong in a database, a small disk."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from app.store.database.sqlite import driver
from tools.service import Service
from tools.waiting import wait_until

PROJECT = Path(__file__).resolve().parents[2]
TINY = {"kind": "benchmark", "model": {"size": "tiny"}}
TABLES = ("sweep", "job", "job_label", "attempt", "measurement", "artifact", "event", "worker", "idempotency_key")

Row = tuple[Any, ...]
State = dict[str, list[Row]]


def http_client(service: Service, timeout_s: float = 30.0) -> httpx.Client:
    """A client of one thread's own."""
    return httpx.Client(base_url=service.url, timeout=timeout_s, trust_env=False, verify=False)


def database_path(service: Service) -> Path:
    return service.data_dir / "flopwatch.sqlite3"


def state_of(path: Path) -> State:
    """Every row of every table, as of one moment."""
    with closing(driver().connect(str(path), isolation_level=None)) as connection:
        connection.execute("BEGIN")
        return {table: connection.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall() for table in TABLES}


def damage(path: Path) -> list[str]:
    """What is broken or half-written in a database; nothing, if all is well."""
    with closing(driver().connect(str(path), isolation_level=None)) as connection:
        connection.execute("BEGIN")

        def ask(question: str) -> list[Row]:
            return connection.execute(question).fetchall()

        found = [f"integrity: {row[0]}" for row in ask("PRAGMA integrity_check") if row[0] != "ok"]
        found += [f"broken reference: {row}" for row in ask("PRAGMA foreign_key_check")]
        return found + half_written(ask)


def half_written(ask: Callable[[str], list[Row]]) -> list[str]:
    """What of a submission is there without the rest, on any engine."""
    found = [
        f"job {job_id} has no event of its submission"
        for (job_id,) in ask(
            "SELECT id FROM job WHERE NOT EXISTS (SELECT 1 FROM event WHERE event.job_id = job.id AND attempt = 0"
            """ AND type = 'state' AND data LIKE '%"queued"%')"""
        )
    ]
    labels: dict[int, dict[str, str]] = {}
    for job_id, key, value in ask("SELECT job_id, key, value FROM job_label"):
        labels.setdefault(job_id, {})[key] = value
    found += [
        f"job {job_id} has labels {sent}, indexed {labels.get(job_id, {})}"
        for job_id, sent in ask("SELECT id, labels FROM job")
        if json.loads(sent) != labels.get(job_id, {})
    ]
    return found + [
        f"Idempotency-Key {key} stands for a job that is not there"
        for (key,) in ask(
            "SELECT key FROM idempotency_key WHERE route = 'POST /jobs' AND resource_id NOT IN (SELECT id FROM job)"
        )
    ]


class Submitters:
    """Client threads that submit numbered jobs; each repeats a request until it is answered 201.

    `answers` holds the first answer of every number, `refusals` every answer that was something else.
    """

    def __init__(self, service: Service, count: int, threads: int) -> None:
        self._service = service
        self._numbers = iter(range(count))
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"client-{i}") for i in range(threads)]
        self.count = count
        self.answers: dict[int, dict[str, Any]] = {}
        self.refusals: list[str] = []
        self.unanswered = 0

    def __enter__(self) -> Submitters:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many are answered in all."""
        wait_until(lambda: len(self.answers) >= count, timeout_s=60, what=f"{count} answers", poll_s=0.001)

    def _run(self) -> None:
        with http_client(self._service) as client:
            while not self._stopped.is_set():
                with self._guard:
                    number = next(self._numbers, None)
                if number is None:
                    return
                wait_until(partial(self._submit, client, number), timeout_s=60, what=f"an answer to {number}")

    def _submit(self, client: httpx.Client, number: int) -> bool:
        body = {"spec": TINY, "name": f"job {number}", "labels": {"number": str(number), "all": "yes"}}
        try:
            answer = client.post("/jobs", json=body, headers={"Idempotency-Key": f"number-{number}"})
        except httpx.TransportError:
            self.unanswered += 1
            return self._stopped.is_set()
        if answer.status_code == 201:
            self.answers[number] = answer.json()
            return True
        self.refusals.append(f"{answer.status_code}: {answer.text}")
        return True


def lost_or_doubled(submitters: Submitters, client: httpx.Client) -> list[str]:
    """What of the answered jobs is not there exactly once, or is not as it was answered."""
    listed = Counter(job["name"] for job in all_jobs(client, label="all:yes"))
    found = [f"not 201 but {refusal}" for refusal in submitters.refusals]
    found += [f"{name} is there {times} times" for name, times in listed.items() if times != 1]
    for number, answered in submitters.answers.items():
        job = client.get(f"/jobs/{answered['id']}")
        if job.status_code != 200:
            found.append(f"job {number} was answered 201 with id {answered['id']}, now {job.status_code}")
        elif job.json() != answered:
            found.append(f"job {number} was answered {answered}, now {job.json()}")
    return found


def all_jobs(client: httpx.Client, **filters: str) -> Iterator[dict[str, Any]]:
    """Every job of a filtered list, over all its pages."""
    after: dict[str, str] = {}
    while True:
        page = client.get("/jobs", params={"limit": "100", **filters, **after}).raise_for_status().json()
        yield from page["data"]
        if page["next"] is None:
            return
        after = {"after": page["next"]}


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with 0 … count-1 in as many threads, all at the same moment; what each returned or raised."""
    gate = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        gate.wait()
        try:
            results[number] = work(number)
        except Exception as error:  # noqa: BLE001 - it is a result, which the test looks at
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def largest_file(folder: Path) -> int:
    """Size in bytes."""
    return max(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def problem_trouble(answer: httpx.Response, status: int, code: str) -> list[str]:
    """Why an answer is not the problem that it should be."""
    if answer.status_code != status or answer.headers.get("content-type") != "application/problem+json":
        return [f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text}"]
    body = answer.json()
    expected = {
        "type": f"urn:flopwatch:problem:{code}",
        "code": code,
        "status": status,
        "instance": answer.request.url.path,
    }
    wrong = {name: value for name, value in expected.items() if body.get(name) != value}
    found = [f"{name} is {body.get(name)!r}, not {value!r}" for name, value in wrong.items()]
    return found + [f"no {name}" for name in ("title", "detail") if not body.get(name)]
