"""What people write about a job afterwards, and who submitted it."""

from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import update

from app.store import tables
from app.store.records import MAX_LABELS
from tests.app.conftest import TINY
from tests.app.web.checker import page


def patched(site: Any, job_id: int, **changes: Any) -> dict[str, Any]:
    answer = site.http.patch(f"/jobs/{job_id}", json=changes, headers={"Content-Type": "application/merge-patch+json"})
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    assert site.job(job_id) == job
    return job


def listed(site: Any, **query: Any) -> list[int]:
    return [job["id"] for job in site.http.get("/jobs", params=query).json()["data"]]


def test_a_finished_job_is_described(fresh_site: Any) -> None:
    job = fresh_site.submit(name="first", labels={"run": "a", "host": "b"})
    fresh_site.worker.finish(fresh_site.worker.claim_job(job["id"]))
    before = fresh_site.http.get(f"/jobs/{job['id']}").headers["etag"]
    now = patched(fresh_site, job["id"], labels={"run": None, "new": "x"}, note="Two\nlines.")
    assert (now["name"], now["labels"], now["note"]) == ("first", {"host": "b", "new": "x"}, "Two\nlines.")
    assert fresh_site.http.get(f"/jobs/{job['id']}").headers["etag"] != before
    assert (listed(fresh_site, label="new:x"), listed(fresh_site, label="run:a")) == ([job["id"]], [])
    assert listed(fresh_site, label="host:b") == [job["id"]]
    now = patched(fresh_site, job["id"], name=None, note=None)
    assert (now["name"], now["labels"], now["note"]) == (None, {"host": "b", "new": "x"}, None)
    assert now["state"] == "succeeded"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"name": "two\nlines"}, "/name"),
        ({"note": "x" * 4001}, "/note"),
        ({"note": "bell \a"}, "/note"),
        ({"labels": {"no blank": "x"}}, "/labels/no blank"),
        ({"labels": {"k": "x" * 201}}, "/labels/k"),
        ({"labels": {f"k{number}": "x" for number in range(MAX_LABELS + 1)}}, "/labels"),
        ({"state": "succeeded"}, "/state"),
    ],
)
def test_what_no_submission_takes_no_change_takes(site: Any, body: dict[str, Any], pointer: str) -> None:
    job = site.submit(labels={"kept": "yes"})
    answer = site.http.patch(f"/jobs/{job['id']}", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    assert site.job(job["id"]) == job


def test_labels_are_counted_together(fresh_site: Any) -> None:
    labels = {f"k{number}": "x" for number in range(MAX_LABELS)}
    job = fresh_site.submit(labels=labels)
    answer = fresh_site.http.patch(f"/jobs/{job['id']}", json={"labels": {"one": "more"}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/labels"
    changed = patched(fresh_site, job["id"], labels={"one": "more", "k0": None})
    del labels["k0"]
    assert changed["labels"] == {**labels, "one": "more"}


def test_a_job_that_is_being_deleted_stays_as_it_is(fresh_site: Any) -> None:
    job = fresh_site.submit()
    with fresh_site.services.database.write() as connection:
        connection.execute(update(tables.job).values(deleting=True))
    assert fresh_site.http.patch(f"/jobs/{job['id']}", json={"note": "x"}).status_code == 409
    assert fresh_site.job(job["id"])["note"] is None


@pytest.mark.parametrize("user", ["ada", "Zoë 😀", "a,b=c%20"])
def test_who_submitted_is_recorded(fresh_site: Any, user: str) -> None:
    job = fresh_site.http.post("/jobs", json={"spec": TINY}, headers={"Flopwatch-User": quote(user)}).json()
    other = fresh_site.submit()
    assert (job["submitted_by"], other["submitted_by"]) == (user, None)
    assert listed(fresh_site, submitted_by=user) == [job["id"]]
    found = page(fresh_site, f"/ui/jobs/{job['id']}")
    assert "Submitted by" in found.text
    [link] = [reference for reference in found.references if reference.startswith("/ui?submitted_by")]
    assert f"/ui/jobs/{job['id']}" in page(fresh_site, link).references
    assert f"/ui/jobs/{other['id']}" not in page(fresh_site, link).references


@pytest.mark.parametrize("user", ["x" * 201, "%0A", "%00"])
def test_no_user_has_such_a_name(fresh_site: Any, user: str) -> None:
    answer = fresh_site.http.post("/jobs", json={"spec": TINY}, headers={"Flopwatch-User": user})
    assert answer.status_code == 422
    assert "Flopwatch-User" in answer.json()["detail"]
    assert listed(fresh_site) == []


def test_the_page_changes_name_labels_and_note(fresh_site: Any) -> None:
    job = fresh_site.submit(name="old", labels={"gone": "x", "kept": "a, b"})
    form = {"name": "new", "labels": '"kept=a, b", other=c', "note": "first\r\n<b>second</b>"}
    assert fresh_site.http.post(f"/ui/jobs/{job['id']}/describe", data=form).status_code == 303
    now = fresh_site.job(job["id"])
    assert (now["name"], now["labels"], now["note"]) == ("new", {"kept": "a, b", "other": "c"}, "first\n<b>second</b>")
    assert "<b>second</b>" in page(fresh_site, f"/ui/jobs/{job['id']}").text, "as text, not as a tag"
    wrong = fresh_site.http.post(f"/ui/jobs/{job['id']}/describe", data={"labels": "no pair"})
    assert wrong.status_code == 422
    assert "must be written key=value" in wrong.text
    assert fresh_site.job(job["id"]) == now
