"""One Idempotency-Key, many requests at once: one job, and every answer the same."""

import random
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.acceptance.faults import TINY, all_jobs, at_once, damage, database_path, http_client, problem_trouble
from tests.acceptance.sabotage import sabotaged
from tools.service import Service

pytestmark = pytest.mark.acceptance

THREADS = 20
KEYS = 5


def submit_at_once(service: Service, rng: random.Random, **environment: str) -> list[str]:
    """Submit each of a few keys from many threads at the same moment; what is wrong with the answers."""
    client = service.start_server(**environment)
    first_answers: dict[str, str] = {}
    with ExitStack() as stack:
        clients = [stack.enter_context(http_client(service)) for _ in range(THREADS)]
        for thread in clients:  # they are connected when the moment comes
            thread.get("/healthz").raise_for_status()
        for _ in range(KEYS):
            key = f"key-{rng.getrandbits(64):x}"
            answers = at_once(THREADS, lambda number, key=key: submit(clients[number], key))  # type: ignore[misc]
            jobs = [job["id"] for job in all_jobs(client, label=f"key:{key}")]
            if found := differences(answers, jobs):
                return [f"{key}: {difference}" for difference in found]
            first_answers[key] = answers[0].text
    return after_a_crash(service, first_answers, **environment) + damage(database_path(service))


def differences(answers: list[Any], jobs: list[int]) -> list[str]:
    """Why these are not the answers to one submission and its repetitions, or the jobs not the one that it made."""
    refused = [getattr(answer, "text", answer) for answer in answers if getattr(answer, "status_code", None) != 201]
    if refused:
        return [f"refused: {refused}"]
    found = []
    if len(bodies := {answer.text for answer in answers}) != 1:
        found.append(f"different answers: {bodies}")
    if locations := {answer.headers["Location"] for answer in answers} - {f"/jobs/{jobs[0]}"}:
        found.append(f"locations: {locations}")
    if (firsts := sum("Idempotency-Replayed" not in answer.headers for answer in answers)) != 1:
        found.append(f"{firsts} answers say that they are the first")
    if len(jobs) != 1:
        found.append(f"jobs: {jobs}")
    return found


def after_a_crash(service: Service, first_answers: dict[str, str], **environment: str) -> list[str]:
    """What is wrong with the answers of a server that was killed and started again."""
    service.server.kill()
    service.server.wait()
    client = service.start_server(**environment)
    found: list[str] = []
    for key, first in first_answers.items():
        if (again := submit(client, key)).text != first or again.headers.get("Idempotency-Replayed") != "true":
            found.append(f"{key}, after a crash: {again.text} instead of {first}")
        other = client.post("/jobs", json={"spec": TINY, "name": "other"}, headers={"Idempotency-Key": key})
        found += problem_trouble(other, 422, "idempotency_mismatch")
    if len(list(all_jobs(client))) != len(first_answers):
        found.append("other jobs appeared")
    return found


def submit(client: httpx.Client, key: str) -> httpx.Response:
    return client.post("/jobs", json={"spec": TINY, "labels": {"key": key}}, headers={"Idempotency-Key": key})


def test_twenty_threads_and_one_key_make_one_job(service: Service, rng: random.Random) -> None:
    assert submit_at_once(service, rng) == []


def test_control_without_lock_and_transaction(service: Service, rng: random.Random) -> None:
    assert submit_at_once(service, rng, **sabotaged("write_lock", "transaction")) != []
