"""The server killed, stopped, out of disk and locked out of its database."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import environment
from tests.acceptance.faults import (
    PROJECT,
    TINY,
    Submitters,
    damage,
    database_path,
    http_client,
    largest_file,
    lost_or_doubled,
    problem_trouble,
)
from tests.acceptance.sabotage import fails_without
from tests.disks import file_size_limit, full, small_disk
from tests.forked import ForkedService
from tools.service import Service
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

SUBMISSIONS = 60
CLIENTS = 8
PROMPT_S = 6.0
"""How soon a server stops that was told to; uvicorn alone would wait for its streams for 10 s."""
BUSY_TIMEOUT_S = 1.0
LOCKED_ANSWER_S = 4.0
"""How soon a locked server answers a write, at the latest."""


def stop_server(service: Service, number: int) -> float:
    """Send the server a signal; how long it took to end, in seconds. It gets no longer than PROMPT_S."""
    started = time.monotonic()
    service.server.send_signal(number)
    try:
        service.server.wait(PROMPT_S)
    except subprocess.TimeoutExpired:
        service.server.kill()
        service.server.wait()
    return time.monotonic() - started


def kill_amid_submissions(service: Service, rng: random.Random) -> list[str]:
    """Kill the server while clients submit; what is wrong with the answers in the end."""
    client = service.start_server()
    moment = rng.randrange(5, SUBMISSIONS - CLIENTS)
    print(f"killed after {moment} answers")
    with Submitters(service, SUBMISSIONS, CLIENTS) as submitters:
        submitters.wait_for_answers(moment)
        stop_server(service, signal.SIGKILL)
        service.start_server()
        submitters.wait_for_answers(SUBMISSIONS)
    return lost_or_doubled(submitters, client)


def test_what_was_answered_survives_kill_9(service: Service, rng: random.Random) -> None:
    assert kill_amid_submissions(service, rng) + damage(database_path(service)) == []


def test_sigterm_stops_the_server_promptly_and_loses_nothing(service: Service, rng: random.Random) -> None:
    """Amid submissions, with a stream and a waiting request open."""
    client = service.start_server()
    job = client.post("/jobs", json={"spec": TINY, "name": "followed"}).raise_for_status().json()
    first_event, ends = threading.Event(), list[str]()

    def follow() -> None:
        with (
            http_client(service) as own,
            own.stream("GET", f"/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"}) as stream,
        ):
            for _ in stream.iter_lines():
                first_event.set()

    def hold() -> None:
        body, headers = {"spec": TINY, "name": "held"}, {"Prefer": "wait=60"}
        with http_client(service) as own:
            answer = own.post("/jobs", json=body, headers=headers)
        if answer.status_code != 201 or answer.json()["state"] != "queued":
            ends.append(f"the held request was answered {answer.status_code}: {answer.text}")

    def telling(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except httpx.HTTPError as error:
                ends.append(f"{work.__name__} ended with {error!r}")

        return run

    threads = [threading.Thread(target=telling(work)) for work in (follow, hold)]
    for thread in threads:
        thread.start()
    assert first_event.wait(30)
    wait_until(lambda: held(client), timeout_s=30, what="the request to be held")
    with Submitters(service, SUBMISSIONS, CLIENTS) as submitters:
        submitters.wait_for_answers(rng.randrange(5, SUBMISSIONS // 2))
        took_s = stop_server(service, signal.SIGTERM)
        for thread in threads:
            thread.join()
        service.start_server()
        submitters.wait_for_answers(SUBMISSIONS)
    if took_s >= PROMPT_S:
        ends.append(f"the server took {took_s:.1f} s to stop")
    assert ends + lost_or_doubled(submitters, client) + damage(database_path(service)) == []


def test_control_of_sigterm(service: Service, rng: random.Random) -> None:
    with fails_without(service, "waking_of_streams", match="s to stop"):
        test_sigterm_stops_the_server_promptly_and_loses_nothing(service, rng)


def held(client: httpx.Client) -> bool:
    return any(job["name"] == "held" for job in client.get("/jobs").raise_for_status().json()["data"])


@contextmanager
def disk_of_a_few_mebibytes(service: Service) -> Iterator[Callable[[], Any]]:
    """The service's data on a small disk; gives what fills it."""
    with small_disk(service.data_dir, "size=3m") as folder:
        yield lambda: full(folder)
        service.stop()  # before its disk goes


@contextmanager
def limited_file_size(service: Service) -> Iterator[Callable[[], Any]]:
    """The service's data on an ordinary disk; gives what keeps the server's files from growing."""

    def fill() -> Any:
        return file_size_limit(service.server.pid, largest_file(service.data_dir))

    yield fill


def submit_to_a_full_disk(service: Service, disk: Any) -> list[str]:
    """Submit until no space is left; what is wrong with the answers, then and after space was made."""
    with disk(service) as fill:
        client = service.start_server()
        first = client.post("/jobs", json={"spec": TINY, "name": "first"}).raise_for_status().json()
        answered = [first]
        with fill():
            for number in range(500):
                key = f"number-{number}"
                body = {"spec": TINY, "name": key, "labels": {"padding": "x" * 200}}
                answer = client.post("/jobs", json=body, headers={"Idempotency-Key": key})
                if answer.status_code != 201:
                    break
                answered.append(answer.json())
            if found := problem_trouble(answer, 507, "disk_full"):
                return found
            cancelled = client.post(f"/jobs/{first['id']}/cancel")
            if cancelled.status_code != 202:  # so short a write may still fit
                found += problem_trouble(cancelled, 507, "disk_full")
            found += problem_trouble(client.get("/readyz"), 507, "disk_full")
            for path in ("/jobs", f"/jobs/{first['id']}", f"/jobs/{first['id']}/events", "/healthz", "/ui"):
                if (read := client.get(path)).status_code != 200:
                    found.append(f"GET {path}: {read.status_code} {read.text}")
        again = client.post("/jobs", json=body, headers={"Idempotency-Key": key})
        if again.status_code != 201 or "Idempotency-Replayed" in again.headers:
            found.append(f"after space was made: {again.status_code} {again.headers} {again.text}")
        else:
            answered.append(again.json())
        kept = client.get("/jobs", params={"limit": 500}).raise_for_status().json()["data"]
        if sorted(job["id"] for job in kept) != [job["id"] for job in answered]:
            found.append(f"answered: {[job['id'] for job in answered]}; there: {[job['id'] for job in kept]}")
        return found + damage(database_path(service))


DISKS = pytest.mark.parametrize("disk", [disk_of_a_few_mebibytes, limited_file_size])


@DISKS
def test_a_full_disk_refuses_writes_and_answers_reads(service: Service, disk: Any) -> None:
    assert submit_to_a_full_disk(service, disk) == []


@DISKS
def test_control_of_the_full_disk(service: Service, disk: Any) -> None:
    with fails_without(service, "error_translation", match="POST /jobs: 500"):
        test_a_full_disk_refuses_writes_and_answers_reads(service, disk)


OURS = """
import sys
from app.store.database.engine import Database
with Database(sys.argv[1]).write():
    print("locked", flush=True)
    sys.stdin.read()
"""
FOREIGN = """
import sys
from app.store.database.sqlite import driver
connection = driver().connect(sys.argv[1].removeprefix("sqlite:///"), isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(service: Service, program: str, end: int | None) -> Iterator[None]:
    """Another process holds the write lock while inside; it ends by itself, or by the signal `end` (after SIGSTOP)."""
    url = f"sqlite:///{database_path(service)}"
    with subprocess.Popen(
        [sys.executable, "-c", program, url], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"locked\n"
        if end is not None:
            holder.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if end is not None:
                holder.send_signal(end)
            holder.communicate()


@pytest.fixture(scope="module")
def impatient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that waits for its database for BUSY_TIMEOUT_S, for all tests of the module that end well."""
    folder = tmp_path_factory.mktemp("impatient")
    with ForkedService(folder / "service", environment(folder)) as running:
        running.start_server(FLOPWATCH_BUSY_TIMEOUT_S=str(BUSY_TIMEOUT_S))
        yield running


def submit_to_a_locked_database(service: Service, program: str, end: int | None) -> list[str]:
    """What is wrong with the answers while another process writes and writes, and afterwards."""
    client = service.client()
    before = len(client.get("/jobs").raise_for_status().json()["data"])
    first = client.post("/jobs", json={"spec": TINY}).raise_for_status().json()
    body, headers = {"spec": TINY, "name": "in the way"}, {"Idempotency-Key": f"after job {first['id']}"}
    with locked(service, program, end), ExitStack() as stack:
        impatient = stack.enter_context(http_client(service, LOCKED_ANSWER_S))
        try:
            busy = impatient.post("/jobs", json=body, headers=headers)
        except httpx.TimeoutException:
            return ["no answer while the database was locked"]
        if found := problem_trouble(busy, 503, "database_busy"):
            return found
        if not busy.headers.get("Retry-After", "").isdigit():
            found.append(f"no Retry-After: {busy.headers}")
        ready = impatient.get("/readyz")
        if ready.status_code != 200:  # writes of its own may have been refused for longer than BUSY_TIMEOUT_S by now
            found += problem_trouble(ready, 503, "database_busy")
        for path in ("/jobs", f"/jobs/{first['id']}"):
            if (read := impatient.get(path)).status_code != 200:
                found.append(f"GET {path}: {read.status_code} {read.text}")
    again = client.post("/jobs", json=body, headers=headers)
    if again.status_code != 201 or "Idempotency-Replayed" in again.headers:
        found.append(f"afterwards: {again.status_code} {again.headers} {again.text}")
    jobs = client.get("/jobs").raise_for_status().json()["data"]
    if len(jobs) != before + 2:
        found.append(f"{len(jobs) - before} more jobs instead of 2")
    return found + damage(database_path(service))


@pytest.mark.parametrize(
    ("program", "end"),
    [
        pytest.param(OURS, None, id="ours"),
        pytest.param(OURS, signal.SIGCONT, id="ours stopped", marks=pytest.mark.long),
        pytest.param(OURS, signal.SIGKILL, id="ours stopped and killed"),
        pytest.param(FOREIGN, None, id="foreign", marks=pytest.mark.long),
        pytest.param(FOREIGN, signal.SIGKILL, id="foreign stopped and killed", marks=pytest.mark.long),
    ],
)
def test_a_locked_database_refuses_writes_and_answers_reads(impatient_service, program, end) -> None:
    assert submit_to_a_locked_database(impatient_service, program, end) == []


@pytest.mark.parametrize(
    ("mechanism", "program", "wrong"),
    [("lock_deadline", OURS, "no answer while"), ("error_translation", FOREIGN, "POST /jobs: 500")],
)
def test_control_of_the_locked_database(service: Service, mechanism: str, program: str, wrong: str) -> None:
    with fails_without(service, mechanism, match=wrong):
        service.start_server(FLOPWATCH_BUSY_TIMEOUT_S=str(BUSY_TIMEOUT_S))
        test_a_locked_database_refuses_writes_and_answers_reads(service, program, None)
