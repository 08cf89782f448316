"""Random bodies: never a 500, always a problem, and nothing stored with an error."""

import copy
import json
from typing import Any
from urllib.parse import quote

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPEC: dict[str, Any] = {
    "kind": "benchmark",
    "model": {"size": "tiny"},
    "batch_size": 1,
    "context_length": 16,
    "gradient_clip_norm": 1.0,
    "compile": False,
    "attention": "eager",
}
JOB: Any = {"spec": SPEC, "name": "n", "labels": {"a": "b"}, "priority": 0, "timeout_s": 1, "max_attempts": 2}
SWEEP: dict[str, Any] = {
    "base": SPEC,
    "grid": {"context_length": [8, 16], "model.size": ["tiny", "small"]},
    "exclude": [{"context_length": 8}],
    "name": "n",
}

texts = st.text(alphabet=st.characters(blacklist_categories=()), max_size=20)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.integers(-(10**400), 10**400))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
known_texts = st.sampled_from(["tiny", "benchmark", "cpu", "tf32", "model.size", "kind", "context_length", "base"])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in places(item, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn, base: Any) -> Any:
    """`base` with one to three values replaced, removed or added."""
    body = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(body)))
        new = draw(values | known_texts)
        if not path:
            continue
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            parent[path[-1]] = new
        elif action == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[draw(texts | known_texts)] = new
        else:
            parent.append(new)
    return body


fuzz = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check(site: Any, route: str, raw: bytes) -> None:
    before = site.rows()
    response = site.http.post(route, content=raw)
    assert response.status_code in (201, 422), response.text
    if response.status_code == 201:
        return
    assert site.rows() == before
    problem = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["errors"]
    assert all(error["pointer"] == "" or error["pointer"].startswith("/") for error in problem["errors"])


@fuzz
@given(body=mutated(JOB))
def test_jobs(site: Any, body: Any) -> None:
    check(site, "/jobs", json.dumps(body).encode())


@fuzz
@given(body=mutated(SWEEP))
def test_sweeps(site: Any, body: Any) -> None:
    check(site, "/sweeps", json.dumps(body).encode())


@fuzz
@given(raw=st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_anything(site: Any, raw: bytes) -> None:
    check(site, "/jobs", raw)
    check(site, "/sweeps", raw)


@fuzz
@given(path=texts, query=st.dictionaries(texts, texts, max_size=3))
def test_urls(site: Any, path: str, query: dict[str, str]) -> None:
    quotable = {key.encode("utf-8", "replace"): value.encode("utf-8", "replace") for key, value in query.items()}
    for prefix in ("/jobs", "/jobs/", "/sweeps/", "/tables", "/ui/jobs/", "/ui", "/"):
        url = prefix + ("" if prefix in ("/jobs", "/tables", "/ui") else quote(path, safe="", errors="replace"))
        response = site.http.get(url, params=quotable)
        assert response.status_code in (200, 307, 308, 404, 422), (url, quotable, response.text)
