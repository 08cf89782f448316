"""The life of a job over HTTP."""

import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.app.conftest import TINY
from tools.waiting import wait_until

JOB_KEYS = {
    "id", "kind", "name", "labels", "state", "spec", "priority", "attempt", "max_attempts", "timeout_s", "progress",
    "error", "worker_id", "sweep_id", "created_at", "started_at", "finished_at", "cancel_requested_at", "environment",
    "validity", "broken", "links", "summary", "waiting", "unique_key", "note", "submitted_by",
    "without_effect", "outcome",
}  # fmt: skip


def test_submitted_job(site: Any) -> None:
    options = {"name": "first", "labels": {"run": "a", "b": ""}, "priority": 3, "timeout_s": 1.5, "max_attempts": 4}
    response = site.http.post("/jobs", json={"spec": {**TINY, "context_length": 64}, **options})
    assert response.status_code == 201
    job = response.json()
    assert response.headers["location"] == f"/jobs/{job['id']}" == job["links"]["self"]
    assert set(job) == JOB_KEYS
    assert {key: job[key] for key in options} == options
    assert (job["state"], job["spec"]["context_length"]) == ("queued", 64)
    assert job["spec"]["batch_size"] == 4, "defaults are filled in"
    assert site.job(job["id"]) == job
    for link in ("self", "events", "logs", "units", "measurements", "tables", "artifacts", "attempts", "ui"):
        assert site.http.get(job["links"][link]).status_code == 200, link


def test_list_is_filtered_and_paged(fresh_site: Any) -> None:
    site = fresh_site
    ids = [site.submit(labels={"n": str(n), "all": "yes"})["id"] for n in range(5)]
    site.http.post(f"/jobs/{ids[0]}/cancel")

    def listed(**query: Any) -> list[int]:
        found, after = [], None
        while True:
            page = site.http.get("/jobs", params={**query, **({"after": after} if after else {})}).json()
            found += [job["id"] for job in page["data"]]
            after = page["next"]
            if after is None:
                return found

    newest_first = ids[::-1]
    assert (listed(), listed(limit=2), listed(limit=5)) == (newest_first, newest_first, newest_first)
    assert (listed(state="cancelled"), listed(kind="benchmark", label=["all:yes", "n:3"])) == ([ids[0]], [ids[3]])
    assert listed(label="n:9") == []
    with site.services.database.write() as connection:
        connection.exec_driver_sql(f"update job set created_at = '2026-01-01 00:00:00' where id <= {ids[1]}")
    assert (listed(since="1h"), listed(since="2025-12-31")) == (newest_first[:3], newest_first)
    assert listed(since="2999-01-01") == []
    refused = site.http.get("/jobs", params={"since": "yesterday"})
    assert (refused.status_code, "must be a span such as" in refused.json()["detail"]) == (422, True)
    refused = site.http.get("/jobs", params={"sweep": 99})
    assert (refused.status_code, refused.json()["detail"]) == (404, "There is no sweep 99.")
    assert listed(kind="unheard-of") == []


def test_etag(site: Any) -> None:
    job = site.submit()
    path = f"/jobs/{job['id']}"
    tag = site.http.get(path).headers["etag"]
    assert tag.startswith('W/"')
    for known in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
        response = site.http.get(path, headers={"If-None-Match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)
    site.http.post(path + "/cancel")
    changed = site.http.get(path, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


def test_the_reason_to_wait_changes_with_the_workers(fresh_site: Any) -> None:
    path = f"/jobs/{fresh_site.submit(spec={'device': 'cuda'})['id']}"
    known = {"If-None-Match": fresh_site.http.get(path).headers["etag"]}
    assert fresh_site.http.get(path, headers=known).status_code == 304
    fresh_site.worker.register()
    now = fresh_site.http.get(path, headers=known)
    assert now.status_code == 200, "the job's version is the same, what it waits for is not"
    assert "GPU" in now.json()["waiting"]


def test_idempotency_key(site: Any) -> None:
    body = {"spec": TINY, "name": "once"}
    first = site.http.post("/jobs", json=body, headers={"Idempotency-Key": "k1"})
    reordered = site.http.post("/jobs", json=dict(reversed(body.items())), headers={"Idempotency-Key": "k1"})
    assert (first.status_code, reordered.status_code) == (201, 201)
    assert first.json() == reordered.json()
    assert "idempotency-replayed" not in first.headers
    assert reordered.headers["idempotency-replayed"] == "true"
    before = site.rows()
    other = site.http.post("/jobs", json={**body, "name": "twice"}, headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert site.rows() == before
    assert site.http.post("/jobs", json=body, headers={"Idempotency-Key": "k2"}).json()["id"] != first.json()["id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/jobs", {"spec": TINY | {"attention": "mine"}}), ("/sweeps", {"base": TINY, "grid": {"attention": ["mine"]}})],
)
def test_a_repeated_request_is_not_judged_again(fresh_site: Any, path: str, body: Any) -> None:
    first = fresh_site.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    fresh_site.worker.register()  # and it has no attention implementation of that name
    assert fresh_site.http.post(path, json=body).status_code == 422
    again = fresh_site.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())


def post(site: Any, key: str, **headers: str) -> Any:
    return site.http.post("/jobs", json={"spec": TINY}, headers={"Idempotency-Key": key, **headers})


def test_a_repeated_request_gets_a_waiters_answer(fresh_site: Any) -> None:
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(post(fresh_site, "k", Prefer="respond-async, wait=30")))
    thread.start()
    wait_until(lambda: fresh_site.rows()["job"], "the job")
    fresh_site.worker.finish(fresh_site.worker.claim())
    thread.join(15)
    assert (first[0].json()["state"], first[0].headers["preference-applied"]) == ("succeeded", "wait=30")
    assert "idempotency-replayed" not in first[0].headers
    for again in (post(fresh_site, "k"), post(fresh_site, "k", Prefer="wait=5")):
        assert (again.status_code, again.json()) == (201, first[0].json())
        assert again.headers["idempotency-replayed"] == "true"


def test_a_wait_that_broke_off_can_be_repeated(fresh_site: Any) -> None:
    """Nobody got the first answer: whoever repeats the request waits for one, and that stays."""
    request = httpx.Request("POST", f"{fresh_site.url}/jobs", json={"spec": TINY})
    request.headers.update({"Idempotency-Key": "k", "Prefer": "wait=1"})
    head = [b"POST /jobs HTTP/1.1", *(name + b": " + value for name, value in request.headers.raw)]
    with socket.create_connection((request.url.host, request.url.port or 0)) as connection:
        connection.sendall(b"\r\n".join([*head, b"", request.content]))
        wait_until(lambda: fresh_site.rows()["job"], "the job")
    began = time.monotonic()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(post(fresh_site, "k", Prefer="wait=20")))
    thread.start()
    wait_until(lambda: time.monotonic() > began + 1.5, "the end of the first wait")
    fresh_site.worker.finish(fresh_site.worker.claim(), "failed")
    thread.join()
    assert (answers[0].status_code, answers[0].json()["state"]) == (201, "failed")
    assert answers[0].headers["idempotency-replayed"] == "true"
    assert post(fresh_site, "k").json() == answers[0].json()
    assert fresh_site.rows()["job"] == 1


def test_a_repeated_request_whose_job_was_deleted(fresh_site: Any) -> None:
    job = post(fresh_site, "k").json()
    fresh_site.worker.finish(fresh_site.worker.claim())
    assert fresh_site.http.delete(f"/jobs/{job['id']}").status_code == 204
    for again in (post(fresh_site, "k"), post(fresh_site, "k", Prefer="wait=5")):
        assert (again.status_code, again.json()["code"], again.json()["job_id"]) == (410, "gone", job["id"])
        assert again.headers["content-type"] == "application/problem+json"
    assert fresh_site.rows()["job"] == 0
    other = fresh_site.http.post("/jobs", json={"spec": TINY, "name": "x"}, headers={"Idempotency-Key": "k"})
    assert other.json()["code"] == "idempotency_mismatch"


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_bad_idempotency_key(site: Any, key: str) -> None:
    response = site.http.post("/jobs", json={"spec": TINY}, headers={"Idempotency-Key": key})
    assert response.status_code == 422
    assert "Idempotency-Key" in response.json()["detail"]


@pytest.mark.parametrize("preference", ["wait", "wait=-1", "wait=soon", "return=minimal", ""])
def test_senseless_preferences_are_ignored(site: Any, preference: str) -> None:
    response = site.http.post("/jobs", json={"spec": TINY}, headers={"Prefer": preference})
    assert response.status_code == 201
    assert "preference-applied" not in response.headers
