"""Sweeps over HTTP."""

from typing import Any

import pytest

BASE = {"kind": "benchmark", "model": {"size": "tiny"}, "batch_size": 2}
GRID = {"model.size": ["tiny", "small"], "context_length": [8, 16, 32]}


def test_submitted_sweep(site: Any) -> None:
    body = {"base": BASE, "grid": GRID, "exclude": [{"model.size": "small", "context_length": 32}], "name": "both"}
    response = site.http.post("/sweeps", json={**body, "labels": {"run": "s"}, "priority": 2, "timeout_s": 9})
    assert response.status_code == 201
    sweep = response.json()
    assert response.headers["location"] == f"/sweeps/{sweep['id']}"
    assert {key: sweep[key] for key in body} == body
    assert sweep["counts"] == {"queued": 5, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    assert site.http.get(f"/sweeps/{sweep['id']}").json() == sweep
    jobs = site.http.get(f"/jobs?sweep={sweep['id']}").json()["data"][::-1]
    points = [(job["spec"]["model"]["size"], job["spec"]["context_length"]) for job in jobs]
    assert points == [("tiny", 8), ("tiny", 16), ("tiny", 32), ("small", 8), ("small", 16)]
    assert {job["spec"]["batch_size"] for job in jobs} == {2}
    assert all(job["labels"] == {"run": "s"} and job["priority"] == 2 and job["timeout_s"] == 9 for job in jobs)
    assert {job["sweep_id"] for job in jobs} == {sweep["id"]}
    assert site.http.get(f"/ui/sweeps/{sweep['id']}").status_code == 200


def test_resume(fresh_site: Any) -> None:
    site = fresh_site
    body = {"base": BASE, "grid": GRID, "priority": 3, "timeout_s": 7.0, "max_attempts": 4, "labels": {"run": "r"}}
    sweep = site.http.post("/sweeps", json=body).json()
    assert sweep["options"] == {"priority": 3, "timeout_s": 7.0, "max_attempts": 4, "submitted_by": None}
    path = f"/sweeps/{sweep['id']}/resume"
    nothing = site.http.post(path)
    assert (nothing.status_code, nothing.json()["code"]) == (409, "conflict")
    site.worker.finish(site.worker.claim())
    failed = site.worker.claim()
    site.worker.finish(failed, "failed")
    site.http.post(f"/sweeps/{sweep['id']}/cancel")
    response = site.http.post(path)
    assert response.status_code == 202
    assert response.json()["counts"] == {"queued": 5, "running": 0, "succeeded": 1, "failed": 0, "cancelled": 0}
    assert response.json() == site.http.get(f"/sweeps/{sweep['id']}").json()
    jobs = site.http.get(f"/jobs?sweep={sweep['id']}").json()["data"]
    assert len(jobs) == 11
    again = jobs[4]
    assert again["spec"] == site.job(failed.job_id)["spec"]
    assert {key: again[key] for key in ("priority", "timeout_s", "max_attempts", "labels")} == {
        key: body[key] for key in ("priority", "timeout_s", "max_attempts", "labels")
    }
    assert (site.http.post(path).status_code, site.http.post(f"{path}?x=1").status_code) == (409, 422)


def test_idempotency_key(site: Any) -> None:
    body = {"base": BASE, "grid": GRID}
    answers = [site.http.post("/sweeps", json=body, headers={"Idempotency-Key": "s"}) for _ in range(2)]
    assert (answers[0].json(), answers[1].headers["idempotency-replayed"]) == (answers[1].json(), "true")
    assert site.http.post("/sweeps", json={**body, "name": "x"}, headers={"Idempotency-Key": "s"}).status_code == 422
    job = site.http.post("/jobs", json={"spec": BASE}, headers={"Idempotency-Key": "s"})
    assert job.status_code == 201, "keys belong to a route"


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"grid": {"context_length": [8, "16"]}}, "/grid/context_length/1", 'got "16"'),
    ({"grid": {"model": [{"size": "tiny"}, {"size": 1}]}}, "/grid/model/1/size", "got 1"),
    ({"grid": {"model.depth": [1]}}, "/grid/model.depth", "Unknown field"),
    ({"grid": {"model.size.x": [1]}}, "/base/model/size", "Must be an object"),
    ({"grid": {"model": [{"size": "tiny"}], "model.size": ["tiny"]}}, "/grid/model.size", "also sets model"),
    ({"grid": {"kind": ["benchmark"]}}, "/grid/kind", "set it in base"),
    ({"grid": {"context_length": [8, 8]}}, "/grid/context_length/1", "twice"),
    ({"grid": {"context_length": []}}, "/grid/context_length", "at least 1"),
    ({"grid": {"a b": [1]}}, "/grid/a b", "pattern"),
    ({"grid": {}}, "/grid", "at least one path"),
    ({"grid": {f: list(range(1, 102)) for f in ("seed", "batch_size")}}, "/grid", "at most 10000"),
    ({"base": {**BASE, "batch_size": 0}}, "/base/batch_size", "greater than or equal to 1"),
    ({"base": {**BASE, "kind": "benchmak"}}, "/base/kind", "known kinds: attention, benchmark"),
    ({"exclude": [{"context_length": 64}]}, "/exclude/0/context_length", "excludes nothing"),
    ({"exclude": [{"seed": 64}]}, "/exclude/0/seed", "Not a path of the grid"),
    ({"exclude": [{}]}, "/exclude/0", "exclude everything"),
    ({"exclude": [{"context_length": n} for n in (8, 16)]}, "/exclude", "no job is left"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "pointer", "hint"), INVALID, ids=[f"{p}: {h}" for _, p, h in INVALID])
def test_invalid_sweeps(site: Any, part: dict[str, Any], pointer: str, hint: str) -> None:
    before = site.rows()
    body = {"base": BASE, "grid": {"context_length": [8, 16]}} | part
    response = site.http.post("/sweeps", json=body)
    assert response.status_code == 422, response.text
    errors = response.json()["errors"]
    assert [error["pointer"] for error in errors] == [pointer]
    assert hint in errors[0]["detail"]
    assert site.rows() == before


def test_a_value_is_wrong_only_with_another(site: Any) -> None:
    """The place of an error of two fields together is the one that the spec blames."""
    body = {"base": {**BASE, "device": "cpu"}, "grid": {"precision": ["fp32", "tf32"]}}
    [error] = site.http.post("/sweeps", json=body).json()["errors"]
    assert error["pointer"] == "/grid/precision/1"
