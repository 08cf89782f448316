"""Bad input: a problem that names the place, never a 500, and nothing stored."""

import html
import json
from typing import Any

import httpx
import pytest

from tests.app.conftest import TINY


def checked(response: httpx.Response, status: int) -> dict[str, Any]:
    """The problem, once it is one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "instance", "code"} <= set(problem)
    assert (problem["status"], problem["type"]) == (status, f"urn:flopwatch:problem:{problem['code']}")
    assert problem["instance"] == response.request.url.path
    assert problem["detail"]
    return problem


INVALID: list[tuple[Any, str, str]] = [
    ({"spec": {**TINY, "context_lenght": 64}}, "/spec/context_lenght", "did you mean context_length?"),
    ({"spec": {**TINY, "context_length": "128"}}, "/spec/context_length", 'got "128"'),
    ({"spec": {**TINY, "optimizer": "adamv"}}, "/spec/optimizer", 'got "adamv"; did you mean adamw?'),
    ({"spec": {"kind": "estimate", "device_gb": "24GiB"}}, "/spec/device_gb", "write the number alone, in the unit of"),
    ({"spec": {**TINY, "timeout_s": "5m"}}, "/spec/timeout_s", "of the job: option --timeout-s"),
    ({"spec": {**TINY, "model": {"d_model": 33, "num_heads": 4}}}, "/spec/model/d_model", "d_model (33) must be"),
    ({"spec": {**TINY, "model": {"size": "tiny", "a/b~c": 1}}}, "/spec/model/a~1b~0c", "Unknown field"),
    ({"spec": {**TINY, "attention": "os.system; rm"}}, "/spec/attention", "pattern"),
    ({"spec": {}}, "/spec/kind", "known kinds: attention, benchmark"),
    ({"spec": {"kind": "compare", "candidate": {**TINY, "x": 1}, "baseline": TINY}}, "/spec/candidate/x", "Unknown"),
    ({"spec": {"kind": "compare", "candidate": TINY, "baseline": {"kind": "compare"}}}, "/spec/baseline/kind", "kinds"),
    ({}, "/spec", "Field required"),
    ("text", "", 'got "text"'),
    ({"spec": TINY, "kind": "benchmark"}, "/kind", "Unknown field"),
    ({"spec": TINY, "name": "two\nlines"}, "/name", 'must be printable, on one line; got "two\\nlines"'),
    ({"spec": TINY, "labels": {"a b": "c"}}, "/labels/a b", "pattern"),
    ({"spec": TINY, "labels": {str(n): "" for n in range(65)}}, "/labels", "at most 64"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "pointer", "hint"), INVALID, ids=[f"{p or 'body'}: {h}" for _, p, h in INVALID])
def test_invalid_fields(site: Any, body: Any, pointer: str, hint: str) -> None:
    before = site.rows()
    problem = checked(site.http.post("/jobs", content=json.dumps(body)), 422)
    [error] = problem["errors"]
    assert error["pointer"] == pointer
    assert hint in error["detail"]
    assert "Value error" not in error["detail"], "pydantic's word before a message of ours"
    assert error["detail"] in problem["detail"]
    assert site.rows() == before


def test_every_wrong_field_is_named(site: Any) -> None:
    body = {"spec": {**TINY, "batch_size": 0, "seed": -1, "x": 1}, "priority": "high"}
    problem = checked(site.http.post("/jobs", json=body), 422)
    pointers = [error["pointer"] for error in problem["errors"]]
    assert sorted(pointers) == ["/priority", "/spec/batch_size", "/spec/seed", "/spec/x"]


RAW: list[tuple[str, bytes, str, str]] = [
    ("broken", b'{"spec": {"kind": }}', "", "line 1 column 19"),
    ("empty", b"", "", "line 1"),
    ("not utf-8", b'{"name": "\xff"}', "", "unicode"),
    ("nan", b'{"spec": {"kind": "benchmark"}, "timeout_s": NaN}', "", "NaN is no number there"),
    ("a key twice", b'{"spec": {"kind": "benchmark", "seed": 1, "seed": 2}}', "", '"seed" stands in one object twice'),
    ("overflow", b'{"spec": {"kind": "benchmark"}, "timeout_s": 1e999}', "/timeout_s", "finite"),
    ("many digits", b'{"spec": {"kind": "benchmark"}, "priority": ' + b"9" * 100_000 + b"}", "", "number out of range"),
    ("lone surrogate", rb'{"spec": {"kind": "benchmark"}, "name": "\ud800"}', "", "line 1"),
    ("nul in a value", rb'{"spec": {"kind": "benchmark"}, "labels": {"a": "x\u0000"}}', "/labels/a", "NUL"),
    ("nul in a key", rb'{"spec": {"kind": "benchmark"}, "labels": {"a\u0000": "x"}}', "/labels", "NUL"),
    ("deep", b'{"spec": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "", "recursion limit"),
]


@pytest.mark.parametrize(("raw", "pointer", "hint"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
def test_not_even_json(site: Any, raw: bytes, pointer: str, hint: str) -> None:
    before = site.rows()
    [error] = checked(site.http.post("/jobs", content=raw), 422)["errors"]
    assert error["pointer"] == pointer
    assert hint in error["detail"]
    assert site.rows() == before


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("route", ["/jobs", "/sweeps"])
def test_body_over_the_limit(site: Any, route: str, *, chunked: bool) -> None:
    limit = site.services.settings.max_body_bytes
    body = json.dumps({"spec": TINY, "name": "x" * (limit + 1)}).encode()
    before = site.rows()
    problem = checked(site.http.post(route, content=iter([body[:1000], body[1000:]]) if chunked else body), 413)
    assert str(limit) in problem["detail"]
    assert site.rows() == before


def test_body_at_the_limit(site: Any) -> None:
    limit = site.services.settings.max_body_bytes
    body = json.dumps({"spec": TINY}).encode()
    assert site.http.post("/jobs", content=body + b" " * (limit - len(body))).status_code == 201
    checked(site.http.post("/jobs", content=body + b" " * (limit - len(body) + 1)), 413)


UNKNOWN_IDS = ["0", "999999", "-1", "abc", "1.0", "1e3", "%20", str(2**63 - 1), str(2**63), "9" * 100, "١", "%00"]
JOB_ROUTES = [
    ("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/events"), ("GET", "/logs"), ("GET", "/measurements"),
    ("GET", "/artifacts"), ("GET", "/artifacts/x"), ("GET", "/attempts"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "suffix"), JOB_ROUTES)
def test_unknown_jobs(site: Any, method: str, suffix: str) -> None:
    for unknown in UNKNOWN_IDS:
        assert checked(site.http.request(method, f"/jobs/{unknown}{suffix}"), 404)["code"] == "not_found"


@pytest.mark.parametrize("unknown", UNKNOWN_IDS)
def test_unknown_sweeps(site: Any, unknown: str) -> None:
    checked(site.http.get(f"/sweeps/{unknown}"), 404)
    checked(site.http.post(f"/sweeps/{unknown}/cancel"), 404)
    checked(site.http.post(f"/sweeps/{unknown}/resume"), 404)


@pytest.mark.parametrize("path", ["/nothing", "/jobs/", "/jobs/1/nothing", "/static/x.js", "/static/%2e%2e/docs.py"])
def test_unknown_routes(site: Any, path: str) -> None:
    checked(site.http.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/jobs", "DELETE, GET, HEAD, POST"),
        ("PUT", "/jobs/1", "DELETE, GET, HEAD, PATCH"),
        ("GET", "/jobs/1/cancel", "POST"),
        ("OPTIONS", "/jobs/cancel", "POST"),
        ("POST", "/jobs/1/tables/a/b", "GET, HEAD"),
        ("POST", "/static/style.css", "GET, HEAD"),
    ],
)
def test_wrong_methods(site: Any, method: str, path: str, allowed: str) -> None:
    response = site.http.request(method, path)
    problem = checked(response, 405)
    assert problem["code"] == "method_not_allowed"
    assert response.headers["allow"] == allowed
    assert allowed in problem["detail"]


QUERIES = [
    ("/jobs?limit=501", "limit"), ("/jobs?state=done", "state"), ("/jobs?label=x", "label"),
    ("/jobs?sweep=" + "9" * 30, "sweep"), ("/jobs?kind=%00", "kind"), ("/jobs?kind=" + "x" * 201, "kind"),
    ("/jobs/{id}?x=1", "x"), ("/jobs/{id}/events?after=-1", "after"),
    ("/jobs/{id}/measurements?samples=maybe", "samples"), ("/tables?format=xml", "format"),
    ("/healthz?x=1", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "parameter"), QUERIES, ids=[path for path, _ in QUERIES])
def test_bad_query_parameters(site: Any, path: str, parameter: str) -> None:
    [error] = checked(site.http.get(path.replace("{id}", str(site.submit()["id"]))), 422)["errors"]
    assert error["pointer"] == ""
    assert parameter in error["detail"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/ui/compare?jobs=51,52", "Unknown query parameter 'jobs'; did you mean job?"),
        ("/jobs?colour=red", "Unknown query parameter 'colour': leave it out; known here: state, "),
    ],
)
def test_an_unknown_query_parameter_has_a_cure(site: Any, path: str, words: str) -> None:
    assert words in html.unescape(site.http.get(path).text)


def test_query_parameters_on_writes(site: Any) -> None:
    before = site.rows()
    checked(site.http.post("/jobs?wait=5", json={"spec": TINY}), 422)
    assert site.rows() == before


def test_an_unforeseen_error_is_a_problem_too(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(type(site.services.reading), "worker_page", broken)
    response = site.http.get("/workers")
    assert checked(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["connection"] == "close", "the server ends it: no client may send its next request there"
