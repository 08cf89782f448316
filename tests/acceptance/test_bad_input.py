"""Bad requests to a real server: each is answered by a problem that names the place and the cure; nothing is stored."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest

from app.specs import KINDS
from tests.acceptance.faults import TINY, database_path, http_client, problem_trouble, state_of
from tools.service import Service

pytestmark = pytest.mark.acceptance

LIMIT_BYTES = 64 << 10
FUZZED = 250
KNOWN_KINDS = f"known kinds: {', '.join(sorted(KINDS))}"
CUSTOM = {"d_model": 96, "d_ff": 64, "num_layers": 1, "num_heads": 5}
SWEEP: dict[str, Any] = {"base": TINY, "grid": {"context_length": [8, 16]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One server for all of these, with one job in it."""
    with Service(tmp_path_factory.mktemp("service"), {"FLOPWATCH_MAX_BODY_BYTES": str(LIMIT_BYTES)}) as running:
        client = running.start_server()
        client.post("/jobs", json={"spec": TINY}).raise_for_status()
        yield running
        assert "Traceback" not in running.logs(), running.logs()


@dataclass(frozen=True)
class Bad:
    """A request and what must be said of it: status, code, and per wrong place its pointer and words of the detail."""

    what: str
    method: str = "POST"
    path: str = "/jobs"
    body: Any = None
    """JSON, or bytes as they are, or a list of bytes sent without Content-Length."""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 422
    code: str = "invalid_request"
    errors: dict[str, str] = field(default_factory=dict)
    """Pointers, and words of the details."""
    detail: str = ""
    """Words of the problem's own detail."""

    def send(self, client: httpx.Client) -> httpx.Response:
        content: Any = self.body
        if isinstance(content, list) and content and isinstance(content[0], bytes):
            content = iter(content)
        elif content is not None and not isinstance(content, bytes):
            content = json.dumps(content).encode()
        return client.request(self.method, self.path, content=content, headers=self.headers)


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {**TINY, **fields}}


def get(path: str, parameter: str) -> Bad:
    return Bad(f"GET {path[:60]}", "GET", path, errors={"": parameter})


FIELDS = [
    Bad("unknown field", body=spec(context_lenght=64), errors={"/spec/context_lenght": "did you mean context_length?"}),
    Bad("unknown option", body={"spec": TINY, "x": 1}, errors={"/x": "known here: name, labels, priority"}),
    Bad("unknown field inside", body=spec(model={"size": "tiny", "a/b~": 1}), errors={"/spec/model/a~1b~0": "Unknown"}),
    Bad("wrong type", body=spec(context_length="128"), errors={"/spec/context_length": 'integer; got "128"'}),
    Bad("a bool is no integer", body=spec(batch_size=True), errors={"/spec/batch_size": "integer; got true"}),
    Bad("out of range", body=spec(measure_steps=1_000_001), errors={"/spec/measure_steps": "equal to 1000000; got"}),
    Bad("heads", body=spec(model=CUSTOM), errors={"/spec/model/d_model": "d_model (96) must be a multiple of 2"}),
    Bad("half a model", body=spec(model={"d_ff": 8}), errors={"/spec/model/d_model": "give size, or all of d_model"}),
    Bad("unknown size", body=spec(model={"size": "huge"}), errors={"/spec/model/size": "'tiny', 'small'"}),
    Bad("tf32 on a CPU", body=spec(precision="tf32", device="cpu"), errors={"/spec/precision": "choose fp32 or bf16"}),
    Bad("unknown kind", body={"spec": {"kind": "bench"}}, errors={"/spec/kind": KNOWN_KINDS}),
    Bad("no kind", body={"spec": {"model": {"size": "tiny"}}}, errors={"/spec/kind": KNOWN_KINDS}),
    Bad("kind is no text", body={"spec": {"kind": ["benchmark"]}}, errors={"/spec/kind": KNOWN_KINDS}),
    Bad("no spec", body={"name": "x"}, errors={"/spec": "Field required"}),
    Bad("not an object", body=[1], errors={"": "got [1]"}),
    Bad("label", body={"spec": TINY, "labels": {"a b": "x"}}, errors={"/labels/a b": "pattern"}),
    Bad("name of two lines", body={"spec": TINY, "name": "a\nb"}, errors={"/name": "on one line"}),
    Bad("huge integer", body={"spec": TINY, "priority": 10**300}, errors={"/priority": "equal to 1000"}),
    Bad("three at once", body={**spec(seed=-1), "priority": 0.5, "timeout_s": 0},
        errors={"/spec/seed": "equal to 0", "/priority": "integer", "/timeout_s": "greater than 0"}),
]  # fmt: skip

TEXTS = [
    Bad("broken JSON", body=b'{"spec": {"kind": }}', errors={"": "line 1 column 19"}),
    Bad("no body", errors={"": "not JSON"}),
    Bad("XML", body=b"<job/>", headers={"Content-Type": "application/xml"}, errors={"": "not JSON"}),
    Bad("a form", body=b"spec=1", headers={"Content-Type": "application/x-www-form-urlencoded"}, errors={"": "JSON"}),
    Bad("compressed", body=b"\x1f\x8b\x08\x00", headers={"Content-Encoding": "gzip"}, errors={"": "not JSON"}),
    Bad("not UTF-8", body=b'{"name": "\xff"}', errors={"": "unicode"}),
    Bad("NaN", body=b'{"spec": {"kind": "benchmark"}, "timeout_s": NaN}', errors={"": "NaN is no number there"}),
    Bad("infinite", body=b'{"spec": {"kind": "benchmark"}, "timeout_s": 1e999}', errors={"/timeout_s": "finite"}),
    Bad("endless digits", body=b'{"priority": ' + b"9" * 50_000 + b"}", errors={"": "out of range"}),
    Bad("lone surrogate", body=rb'{"name": "\ud800"}', errors={"": "line 1 column"}),
    Bad("NUL", body=rb'{"spec": {"kind": "benchmark"}, "labels": {"a": "\u0000"}}', errors={"/labels/a": "NUL"}),
    Bad("deep nesting", body=b'{"spec": ' + b"[" * 30_000, errors={"": "recursion limit"}),
    Bad("a key twice", body=b'{"priority": 1, "priority": 2}', errors={"": '"priority" stands in one object twice'}),
    Bad("over the limit", body=b" " * (LIMIT_BYTES + 1), status=413, code="body_too_large", detail=str(LIMIT_BYTES)),
    Bad("over the limit in chunks", body=[b" " * LIMIT_BYTES, b" "], status=413, code="body_too_large",
        detail="FLOPWATCH_MAX_BODY_BYTES"),
]  # fmt: skip

PLACES = [
    *[Bad(f"unknown id {name[:25]!a}", "GET", f"/jobs/{quote(name)}", status=404, code="not_found", detail="no job")
      for name in ("999", "0", "-1", "abc", "1.0", str(2**63 - 1), str(2**63), str(2**64 + 1), "9" * 200, "١", "\0")],
    *[Bad(f"unknown id, {method} {end}", method, f"/jobs/999{end}", status=404, code="not_found", detail="no job 999")
      for method, end in (("POST", "/cancel"), ("DELETE", ""), ("GET", "/events"), ("GET", "/logs"),
                          ("GET", "/measurements"), ("GET", "/artifacts"), ("GET", "/artifacts/a"))],
    Bad("unknown sweep", "GET", f"/sweeps/{2**70}", status=404, code="not_found", detail="There is no sweep"),
    Bad("unknown artifact", "GET", "/jobs/1/artifacts/..%2f..%2fx", status=404, code="not_found"),
    Bad("unknown route", "GET", "/job", status=404, code="not_found", detail="/docs lists the routes"),
    Bad("wrong method", "PUT", body={}, status=405, code="method_not_allowed", detail="it takes DELETE, GET, POST"),
    Bad("wrong method", "GET", "/jobs/1/cancel", status=405, code="method_not_allowed", detail="it takes POST"),
    Bad("unfinished", "DELETE", "/jobs/1", status=409, code="conflict", detail="cancel it first"),
]  # fmt: skip

PARAMETERS = [
    get("/jobs?colour=red", "Unknown query parameter 'colour'"), get("/jobs/1?x=1", "Unknown query parameter: x"),
    get("/jobs?limit=0", "'limit'"), get("/jobs?limit=ten", "'limit'"), get("/jobs?limit=501", "to 500"),
    get("/jobs?after=abc", "the `next` of an earlier page"), get(f"/jobs?after={10**25}", "the `next` of an earlier"),
    get("/jobs?label=x", "key:value"), get("/jobs?label=%00:a", "NUL"), get("/jobs?state=done", "'queued'"),
    get(f"/jobs?sweep={2**64}", "'sweep'"), get("/jobs/1/events?after=-1", "'after'"),
    get("/jobs/1/measurements?samples=perhaps", "'samples'"), get("/tables?format=xml", "'format'"),
    Bad("query of a write", path="/jobs?wait=5", body={"spec": TINY}, errors={"": "Unknown query parameter: wait"}),
    Bad("Last-Event-ID", "GET", "/jobs/1/events", headers={"Last-Event-ID": "x"}, errors={"": "Last-Event-ID"}),
    Bad("empty Idempotency-Key", body={"spec": TINY}, headers={"Idempotency-Key": ""}, errors={"": "1 to 255"}),
    Bad("long Idempotency-Key", body={"spec": TINY}, headers={"Idempotency-Key": "k" * 256}, errors={"": "1 to 255"}),
    Bad("odd Idempotency-Key", body={"spec": TINY}, headers={"Idempotency-Key": "a\tb"}, errors={"": "printable"}),
    Bad("from another site", body={"spec": TINY}, headers={"Origin": "http://example.org"}, status=403,
        code="cross_site_request", detail="another site"),
]  # fmt: skip


def sweep(what: str, errors: dict[str, str], **fields: Any) -> Bad:
    return Bad(f"sweep: {what}", path="/sweeps", body={**SWEEP, **fields}, errors=errors)


SWEEPS = [
    sweep("empty grid", {"/grid": "at least one path"}, grid={}),
    sweep("empty list", {"/grid/context_length": "at least 1"}, grid={"context_length": []}),
    sweep("no list", {"/grid/context_length": "array; got 8"}, grid={"context_length": 8}),
    sweep("unknown path", {"/grid/model.sise": "did you mean size?"}, grid={"model.sise": ["tiny"]}),
    sweep("not a path", {"/grid/model..size": "pattern"}, grid={"model..size": ["tiny"]}),
    sweep("below no object", {"/base/seed": "Must be an object"}, base={**TINY, "seed": 1}, grid={"seed.x": [1]}),
    sweep("wrong value", {"/grid/context_length/1": "greater than or equal to 1"}, grid={"context_length": [8, 0]}),
    sweep("wrong type", {"/grid/compile/0": "boolean; got"}, grid={"compile": ["yes"]}),
    sweep("wrong base", {"/base/batch_size": "integer"}, base={**TINY, "batch_size": None}),
    sweep("unknown kind", {"/base/kind": KNOWN_KINDS}, base={"kind": "bench"}),
    sweep("two kinds", {"/grid/kind": "set it in base"}, grid={"kind": ["benchmark"]}),
    sweep("a value twice", {"/grid/seed/1": "in the list twice"}, grid={"seed": [1, 1]}),
    sweep("too many", {"/grid": "split it"}, grid={"seed": list(range(1000)), "batch_size": list(range(1, 12))}),
    sweep("all excluded", {"/exclude": "no job is left"}, exclude=[{"context_length": 8}, {"context_length": 16}]),
    sweep("excludes nothing", {"/exclude/0/context_length": "excludes nothing"}, exclude=[{"context_length": 7}]),
    sweep("unknown option", {"/colour": "Unknown field"}, colour="red"),
    Bad("sweep: a path twice", path="/sweeps", body=b'{"base": {}, "grid": {"seed": [1], "seed": [2]}}',
        errors={"": 'key "seed" stands in one object twice'}),
]  # fmt: skip

ALL = [*FIELDS, *TEXTS, *PLACES, *PARAMETERS, *SWEEPS]


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.what)
def test_bad_requests(server: Service, bad: Bad) -> None:
    before = state_of(database_path(server))
    with http_client(server) as client:
        answer = bad.send(client)
    assert problem_trouble(answer, bad.status, bad.code) == []
    problem = answer.json()
    assert bad.detail in problem["detail"]
    said = {error["pointer"]: error["detail"] for error in problem.get("errors", [])}
    assert set(said) == set(bad.errors)
    for pointer, words in bad.errors.items():
        assert words in said[pointer]
    assert state_of(database_path(server)) == before


@pytest.mark.parametrize(
    "prefer", ["wait", "wait=", "wait=-1", "wait=soon", "wait=1e3", "respond-async", '"', "wait=0"]
)
def test_a_preference_that_makes_no_sense_is_ignored(server: Service, prefer: str) -> None:
    with http_client(server) as client:
        answer = client.post("/jobs", json={"spec": TINY}, headers={"Prefer": prefer})
    assert answer.status_code == 201, answer.text
    assert answer.json()["state"] == "queued"


RAW = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no host": b"POST /jobs HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "negative length": b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
    "two lengths": b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "bad chunk": b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "long header": b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "long path": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a body": b'POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"spec": ',
    "half a header": b"POST /jobs HT",
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_what_is_hardly_http(server: Service, raw: bytes) -> None:
    before = state_of(database_path(server))
    with socket.create_connection(address(server), timeout=20) as connection:
        with suppress(OSError):  # the server may have seen enough
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: received(connection), b""))
    assert not answer or b"HTTP/1.1 4" in answer, answer
    with http_client(server) as client:
        assert client.get("/healthz").status_code == 200
    assert state_of(database_path(server)) == before


def test_an_endless_body_takes_no_memory(server: Service) -> None:
    assert server.server is not None
    process = psutil.Process(server.server.pid)
    before = process.memory_info().rss
    sent, most = 0, 256 << 20
    with socket.create_connection(address(server), timeout=20) as connection:
        with suppress(OSError):  # the server has had enough
            connection.sendall(b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            while sent < most:
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                sent += 1 << 20
        answer = received(connection)
    assert sent < most
    assert not answer or b" 413 " in answer
    assert process.memory_info().rss - before < 64 << 20


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def address(server: Service) -> tuple[str, int]:
    url = httpx.URL(server.url)
    return url.host, url.port or 80


def test_random_requests_never_break_the_server(server: Service, rng: random.Random) -> None:
    with http_client(server) as client:
        for _ in range(FUZZED):
            path, body = random_request(rng)
            before = state_of(database_path(server))
            answer = client.post(path, content=body)
            assert answer.status_code in {201, 403, 413, 422}, (body, answer.status_code, answer.text)
            if answer.status_code == 201:
                assert client.get(answer.headers["Location"]).json() == answer.json()
            else:
                assert problem_trouble(answer, answer.status_code, answer.json()["code"]) == []
                assert state_of(database_path(server)) == before, body


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """A valid body with a few values replaced, or bytes of it changed."""
    path, valid = rng.choice([("/jobs", spec(model={"size": "tiny"})), ("/sweeps", SWEEP)])
    body = json.loads(json.dumps({**valid, "labels": {"a": "b"}, "timeout_s": 1.5}))
    for _ in range(rng.randint(0, 2)):
        inside = body
        while (inner := [value for value in inside.values() if isinstance(value, dict)]) and rng.random() < 0.6:
            inside = rng.choice(inner)
        inside[rng.choice([*inside, random_text(rng)])] = random_value(rng)
    raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5, allow_nan=True).encode(errors="surrogatepass"))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return path, bytes(raw)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind < 4:
        return rng.choice([None, True, 0, -1, 1, 1e308, float("nan"), float("-inf"), 2**63, 10**100, 0.5, "", "tiny"])
    if kind < 7:
        return random_text(rng)
    if kind == 7:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {random_text(rng): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def random_text(rng: random.Random) -> str:
    alphabet = ["a", "/", "~", ".", "\0", "\ud800", "é", "🙂", "\n", '"', "model", "size", "seed", "kind"]
    return "".join(rng.choices(alphabet, k=rng.randint(0, 4)))
