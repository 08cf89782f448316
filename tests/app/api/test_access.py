"""Tokens, scopes, sessions, and the limits of requests and queued jobs."""

import hashlib
import json
import logging
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.api import events, guard
from app.api.guard import Access, Guard, RequestLimit
from app.errors import StorageFailed, TooManyRequests, Unauthorized
from app.main import create_app
from app.settings import Settings
from app.store.reading import monitoring
from app.store.tables import utc_now
from app.store.tokens import Tokens
from app.tokens import SCOPES, Scope, mint
from app.web.pages.sign_in import MAX_FORM_BYTES
from benchmarks import latencies
from tests.app.api.streams import STREAM, parse_stream
from tests.app.api.test_writing import FORM, SOURCE, WRITES
from tests.app.conftest import TINY

BOOTSTRAP = "bootstrap-s3cret"
SHA256 = hashlib.sha256(SOURCE).hexdigest()
CODE_SPEC = {
    "kind": "attention",
    "sequence_lengths": [8],
    "implementations": ["eager"],
    "code": {"sha256": SHA256, "function": "attention"},
}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def guarded(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(tmp_path_factory.mktemp("guarded"), api_token=BOOTSTRAP) as site:
        site.worker.register(
            frozenset({"benchmark", "attention"}),
            frozenset({"attention:eager", "model:transformer_lm", "code:uploaded"}),
        )
        yield site


def made(site: Any, name: str, scope: Scope, token: str = BOOTSTRAP) -> str:
    answer = site.http.post("/tokens", json={"name": name, "scope": scope, "expires_days": 1}, headers=bearer(token))
    assert answer.status_code == 201, answer.text
    return answer.json()["token"]


@pytest.fixture(scope="module")
def tokens(guarded: Any) -> dict[Scope, str]:
    """A token of each scope, each named after it."""
    return {scope: made(guarded, scope, scope) for scope in SCOPES}


@pytest.fixture(scope="module")
def ada(guarded: Any) -> str:
    return made(guarded, "ada", "submit")


@pytest.fixture(scope="module")
def bob(guarded: Any) -> str:
    return made(guarded, "bob", "submit")


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return answer.json()


OPEN = {"GET /healthz", "GET /ui/sign-in", "POST /ui/sign-in", "POST /ui/sign-out"}
ASKED: dict[str, Scope] = {
    "PUT /files/{sha256}": "code",
    "PUT /queue/paused": "admin",
    **dict.fromkeys(("GET /tokens", "POST /tokens", "DELETE /tokens/{token_id}"), "admin"),
    # The job and the sweep are somebody else's.
    **dict.fromkeys(
        (f"POST {at}/jobs/{{job_id}}/{verb}" for at in ("", "/ui") for verb in ("cancel", "retry")), "admin"
    ),
    **dict.fromkeys(
        (f"POST {at}/sweeps/{{sweep_id}}/{verb}" for at in ("", "/ui") for verb in ("cancel", "resume")), "admin"
    ),
    **dict.fromkeys(("DELETE /jobs/{job_id}", "POST /ui/jobs/cancel"), "admin"),
    **dict.fromkeys(
        (
            *("POST /jobs", "POST /sweeps", "PATCH /jobs/{job_id}", "PUT /baselines/{name}"),
            # Without `admin` they choose the sender's own jobs.
            *("DELETE /jobs", "POST /jobs/cancel"),
            *("DELETE /baselines/{name}", "POST /ui/new", "POST /ui/demo", "POST /ui/jobs/{job_id}/describe"),
        ),
        "submit",
    ),
}
"""The scope that each route asks for, where it is not to read."""


def test_every_route_asks_for_its_scope(guarded: Any, tokens: dict[Scope, str], tmp_path: Path) -> None:
    """A new route that writes has to be added above; one that reads is asked for by itself."""
    routes = latencies.routes_of(create_app(Settings(data_dir=tmp_path)))
    writing = {route for route in routes if not route.startswith("GET ")}
    assert writing - OPEN == {route for route in ASKED if not route.startswith("GET ")}
    job, sweep = site_with_both(guarded)
    for route in sorted(routes - OPEN):
        needed = ASKED.get(route, "read")
        for held in SCOPES[: SCOPES.index(needed)]:
            answer = asked(guarded, route, job, sweep, tokens[held])
            assert answer.status_code == 403, (route, held)
            named = "submit" if held == "read" and not route.startswith("GET ") else needed
            assert answer.headers["www-authenticate"].endswith(f'scope="{named}"'), (route, held)
        assert asked(guarded, route, job, sweep, mint()[1]).status_code == 401, route
    for route in sorted(route for route in routes - OPEN if route.startswith("GET ")):
        assert asked(guarded, route, job, sweep, tokens[ASKED.get(route, "read")]).status_code not in (401, 403), route
    for route in OPEN - {"POST /ui/sign-in"}:
        assert asked(guarded, route, job, sweep, "").status_code in (200, 303), route
    assert guarded.http.get("/static/style.css").status_code == 200


def site_with_both(site: Any) -> tuple[int, int]:
    """A job and a sweep of nobody."""
    job = site.http.post("/jobs", json={"spec": TINY}, headers=bearer(BOOTSTRAP)).json()["id"]
    body = {"base": TINY, "grid": {"seed": [1]}}
    return job, site.http.post("/sweeps", json=body, headers=bearer(BOOTSTRAP)).json()["id"]


def asked(site: Any, route: str, job: int, sweep: int, token: str) -> httpx.Response:
    method, _, path = route.partition(" ")
    known = {"job_id": job, "sweep_id": sweep, "sha256": SHA256}
    path = re.sub(r"{(\w+)}", lambda match: str(known.get(match[1], "x")), path)
    body = b"job=%d" % job if route == "POST /ui/jobs/cancel" else WRITES.get(route)
    if route in ("POST /jobs/cancel", "DELETE /jobs"):
        path += "?label=a:b"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**(bearer(token) if token else {}), **(FORM if "/ui/" in path else {})}
    return site.http.request(method, path, content=None if method == "GET" else content, headers=headers)


def test_what_is_wrong_with_a_token_is_said(guarded: Any, tokens: dict[Scope, str]) -> None:
    def why(token: str) -> str:
        detail: str = refused(guarded.http.get("/jobs", headers=bearer(token)), 401, "unauthorized")["detail"]
        assert token not in detail
        return detail

    assert "mistyped" in why(tokens["read"][:-1])
    assert "is no token" in why("hunter2")
    assert "was revoked, or belongs to another server" in why(mint()[1])
    assert "There is no token" in why(mint()[1])
    expired = guarded.services.access_tokens.create("ada", "read", utc_now() - timedelta(seconds=1))[1]
    guarded.services.guard._read_at = -math.inf
    assert "expired on" in why(expired)


def test_an_id_with_another_secret_is_refused(guarded: Any, tokens: dict[Scope, str]) -> None:
    token_id = tokens["admin"].split("_")[1]
    forged = f"fw_{token_id}_{'0' * 64}"
    forged += f"{zlib.crc32(forged.encode()):08x}"
    refused(guarded.http.get("/jobs", headers=bearer(forged)), 401, "unauthorized")


def test_a_revoked_token_ends_at_once(guarded: Any) -> None:
    token = made(guarded, "bob", "read")
    assert guarded.http.get("/jobs", headers=bearer(token)).status_code == 200
    path = f"/tokens/{token.split('_')[1]}"
    assert guarded.http.delete(path, headers=bearer(BOOTSTRAP)).status_code == 204
    refused(guarded.http.get("/jobs", headers=bearer(token)), 401, "unauthorized")
    refused(guarded.http.delete(path, headers=bearer(BOOTSTRAP)), 404, "not_found")


def test_the_first_token_closes_an_open_server(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as site:
        body = {"name": "ada", "scope": "submit", "expires_days": None}
        assert refused(site.http.post("/tokens", json=body), 422, "invalid_request")["errors"][0]["pointer"] == "/scope"
        token = site.http.post("/tokens", json={**body, "scope": "admin"}).json()["token"]
        refused(site.http.get("/jobs"), 401, "unauthorized")
        assert site.http.get("/jobs", headers=bearer(token)).status_code == 200
        made(site, "bob", "read", token)
    with serve(tmp_path) as site:
        refused(site.http.get("/jobs"), 401, "unauthorized")


def test_the_last_token_stays_unless_another_closes_the_server(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as site:
        last = site.http.post("/tokens", json={"name": "ada", "scope": "admin", "expires_days": None}).json()["token"]
        path = f"/tokens/{last.split('_')[1]}"
        refused(site.http.delete(path, headers=bearer(last)), 409, "conflict")
        refused(site.http.get("/jobs"), 401, "unauthorized")
        other = made(site, "bob", "admin", last)
        assert site.http.delete(path, headers=bearer(other)).status_code == 204
    with serve(tmp_path, api_token=BOOTSTRAP) as site:
        path = f"/tokens/{other.split('_')[1]}"
        assert site.http.delete(path, headers=bearer(BOOTSTRAP)).status_code == 204
        refused(site.http.get("/jobs"), 401, "unauthorized")


def test_a_server_stays_closed_whose_last_token_another_server_revokes(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path) as site:
        token = site.http.post("/tokens", json={"name": "ada", "scope": "admin", "expires_days": None}).json()["token"]
        site.services.access_tokens.revoke(token.split("_")[1])  # as a server with FLOPWATCH_API_TOKEN may
        site.services.guard._read_at = -math.inf
        for headers in ({}, bearer(token)):
            refused(site.http.get("/jobs", headers=headers), 401, "unauthorized")


def test_a_server_whose_tokens_cannot_be_read_stays_closed(guarded, tokens, monkeypatch) -> None:
    def fail(_self: Tokens) -> Any:
        raise StorageFailed("The disk fails.")

    monkeypatch.setattr(Tokens, "known", fail)
    guarded.services.guard._read_at = -math.inf
    assert guarded.http.get("/jobs", headers=bearer(tokens["read"])).status_code == 200
    refused(guarded.http.get("/jobs"), 401, "unauthorized")


def test_tokens_are_listed_without_their_secrets(guarded, tokens, monkeypatch) -> None:
    guarded.http.get("/jobs", headers=bearer(tokens["code"]))
    before = {one["id"]: one for one in guarded.http.get("/tokens", headers=bearer(BOOTSTRAP)).json()["data"]}
    guarded.services.guard.note_uses()
    listed = guarded.http.get("/tokens", headers=bearer(BOOTSTRAP))
    used = {one["id"]: one for one in listed.json()["data"]}[tokens["code"].split("_")[1]]
    assert used.keys() == {"id", "name", "scope", "created_at", "expires_at", "last_used_at"}
    assert used["last_used_at"] > used["created_at"]
    assert before[used["id"]]["last_used_at"] is None, "requests do not write"
    assert not [token for token in tokens.values() if token in listed.text or token[-72:-8] in listed.text]
    monkeypatch.setattr(Tokens, "note_uses", lambda *_: pytest.fail("Nothing was used since."))
    guarded.services.guard.note_uses()


class TestWhoseJobs:
    def submit(self, site: Any, token: str, **body: Any) -> dict[str, Any]:
        headers = {**bearer(token), "Flopwatch-User": "somebody%20else"}
        answer = site.http.post("/jobs", json={"spec": TINY, **body}, headers=headers)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def test_a_job_has_its_tokens_name(self, guarded: Any, ada: str) -> None:
        assert self.submit(guarded, ada)["submitted_by"] == "ada"
        assert self.submit(guarded, BOOTSTRAP)["submitted_by"] == "somebody else", "a proxy may say it"

    @pytest.mark.parametrize("path", ["/jobs", "/sweeps"])
    def test_an_idempotency_key_is_its_senders(self, guarded: Any, ada: str, bob: str, path: str) -> None:
        body = {"spec": TINY} if path == "/jobs" else {"base": TINY, "grid": {"seed": [1]}}

        def submitted(token: str) -> int:
            answer = guarded.http.post(path, json=body, headers={**bearer(token), "Idempotency-Key": "nightly"})
            assert answer.status_code == 201, answer.text
            return answer.json()["id"]

        of_ada, of_bob = submitted(ada), submitted(bob)
        assert of_ada != of_bob
        assert (submitted(ada), submitted(bob)) == (of_ada, of_bob)

    def test_one_changes_ones_own_jobs(self, guarded: Any, ada: str, bob: str) -> None:
        job = self.submit(guarded, ada)["id"]
        for method, path in (("POST", f"/jobs/{job}/cancel"), ("POST", f"/jobs/{job}/retry")):
            problem = refused(guarded.http.request(method, path, headers=bearer(bob)), 403, "insufficient_scope")
            assert f"Job {job} was submitted by ada, not by bob" in problem["detail"]
            assert guarded.http.request(method, path, headers=bearer(ada)).status_code == 202
        guarded.http.post(f"/jobs/{job}/cancel", headers=bearer(BOOTSTRAP)).raise_for_status()
        refused(guarded.http.delete(f"/jobs/{job}", headers=bearer(bob)), 403, "insufficient_scope")
        assert guarded.http.delete(f"/jobs/{job}", headers=bearer(ada)).status_code == 204

    def test_who_names_no_token_owns_nothing(self, guarded: Any, ada: str) -> None:
        headers = {**bearer(BOOTSTRAP), "Flopwatch-User": "mallory"}
        job = guarded.http.post("/jobs", json={"spec": TINY}, headers=headers).json()["id"]
        claimed = {**bearer(ada), "Flopwatch-User": "mallory"}
        refused(guarded.http.post(f"/jobs/{job}/cancel", headers=claimed), 403, "insufficient_scope")

    def test_a_sweep_is_its_submitters(self, guarded: Any, ada: str, bob: str) -> None:
        sweep = guarded.http.post("/sweeps", json={"base": TINY, "grid": {"seed": [1, 2]}}, headers=bearer(ada)).json()
        assert sweep["options"]["submitted_by"] == "ada"
        for verb in ("cancel", "resume"):
            path = f"/sweeps/{sweep['id']}/{verb}"
            refused(guarded.http.post(path, headers=bearer(bob)), 403, "insufficient_scope")
            assert guarded.http.post(path, headers=bearer(ada)).status_code == 202

    @pytest.mark.parametrize("more", [{}, {"mine": True}, {"submitted_by": "ada"}])
    def test_a_filter_chooses_ones_own(self, guarded: Any, ada: str, more: dict[str, Any]) -> None:
        labels = {"bulk": "own"}
        own, other = self.submit(guarded, ada, labels=labels), self.submit(guarded, BOOTSTRAP, labels=labels)
        chosen = {"label": "bulk:own"}
        answer = guarded.http.post("/jobs/cancel", params={**chosen, **more}, headers=bearer(ada))
        assert answer.json()["cancelled"] == 1
        states = [guarded.http.get(f"/jobs/{one['id']}", headers=bearer(ada)).json()["state"] for one in (own, other)]
        assert states == ["cancelled", "queued"]
        guarded.http.post("/jobs/cancel", params=chosen, headers=bearer(BOOTSTRAP))
        answer = guarded.http.delete("/jobs", params={**chosen, **more}, headers=bearer(ada))
        assert answer.json()["deleted"] == 1
        assert guarded.http.delete("/jobs", params=chosen, headers=bearer(BOOTSTRAP)).json()["deleted"] == 1

    def test_a_filter_chooses_nobody_elses(self, guarded: Any, ada: str) -> None:
        for query in ({"submitted_by": "bob"}, {"submitted_by": "bob", "state": "queued"}):
            refused(guarded.http.post("/jobs/cancel", params=query, headers=bearer(ada)), 403, "insufficient_scope")
        refused(guarded.http.post("/jobs/cancel", headers=bearer(ada)), 422, "invalid_request")
        both = {"submitted_by": "bob", "mine": True}
        refused(guarded.http.post("/jobs/cancel", params=both, headers=bearer(ada)), 422, "invalid_request")

    def test_mine_of_a_sender_without_a_name_is_refused(self, guarded: Any) -> None:
        problem = refused(guarded.http.get("/jobs?mine=true", headers=bearer(BOOTSTRAP)), 422, "invalid_request")
        assert "names no user" in problem["detail"]
        named = {**bearer(BOOTSTRAP), "Flopwatch-User": "zoe"}
        guarded.http.post("/jobs", json={"spec": TINY}, headers=named)
        listed = guarded.http.get("/jobs?mine=true", headers=named).json()["data"]
        assert {job["submitted_by"] for job in listed} == {"zoe"}

    def test_uploaded_code_asks_for_code(self, guarded: Any, tokens: dict[Scope, str], ada: str) -> None:
        path = f"/files/{SHA256}"
        refused(guarded.http.put(path, content=SOURCE, headers=bearer(ada)), 403, "insufficient_scope")
        assert guarded.http.put(path, content=SOURCE, headers=bearer(tokens["code"])).status_code in (200, 201)
        bodies = {"/jobs": {"spec": CODE_SPEC}, "/sweeps": {"base": CODE_SPEC, "grid": {"seed": [1]}}}
        for path, body in bodies.items():
            for query in ("", "?dry_run=true"):
                answer = guarded.http.post(path + query, json=body, headers=bearer(ada))
                assert refused(answer, 403, "insufficient_scope")["scope"] == "code"
            assert guarded.http.post(path, json=body, headers=bearer(tokens["code"])).status_code == 201

    def test_running_code_again_asks_for_code(self, guarded: Any) -> None:
        guarded.services.uploads.put(SOURCE)
        code, submit = made(guarded, "eve", "code"), made(guarded, "eve", "submit")
        job = guarded.http.post("/jobs", json={"spec": CODE_SPEC}, headers=bearer(code)).json()["id"]
        body = {"base": CODE_SPEC, "grid": {"seed": [1]}}
        sweep = guarded.http.post("/sweeps", json=body, headers=bearer(code)).json()["id"]
        body = {"base": {**CODE_SPEC, "code": {"sha256": SHA256}}, "grid": {"code.function": ["attention"]}}
        in_parts = guarded.http.post("/sweeps", json=body, headers=bearer(code)).json()["id"]
        again = ((f"/jobs/{job}", "retry"), (f"/sweeps/{sweep}", "resume"), (f"/sweeps/{in_parts}", "resume"))
        for path, verb in again:
            assert guarded.http.post(f"{path}/cancel", headers=bearer(submit)).status_code == 202
            answer = guarded.http.post(f"{path}/{verb}", headers=bearer(submit))
            assert refused(answer, 403, "insufficient_scope")["scope"] == "code"
            assert guarded.http.post(f"{path}/{verb}", headers=bearer(code)).status_code == 202


class TestLimits:
    def test_a_minutes_requests(self) -> None:
        now = 1000.0
        limit = RequestLimit(60, lambda: now)
        for _ in range(60):
            limit.count("ada")
        with pytest.raises(TooManyRequests) as error:
            limit.count("ada")
        assert error.value.headers == {"Retry-After": "1"}
        limit.count("bob")
        now += 1.0
        limit.count("ada")
        with pytest.raises(TooManyRequests):
            limit.count("ada")
        now += 3600.0
        for _ in range(60):
            limit.count("ada")

    def test_too_many_requests_are_answered_429(self, serve: Any, tmp_path: Path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP, requests_per_minute=4) as site:
            ada, bob = made(site, "ada", "read"), made(site, "bob", "read")
            answers = [site.http.get("/jobs", headers=bearer(ada)).status_code for _ in range(5)]
            assert answers == [200] * 4 + [429]
            answer = site.http.get("/jobs", headers=bearer(ada))
            refused(answer, 429, "too_many_requests")
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert site.http.get("/jobs", headers=bearer(bob)).status_code == 200
            assert [site.http.get("/jobs").status_code for _ in range(5)] == [401] * 4 + [429], "by their address"
            assert made(site, "cy", "read"), "FLOPWATCH_API_TOKEN is not counted with visitors of its address"
            answer = site.http.post("/ui/sign-in", data={"token": bob})
            assert (answer.status_code, site.http.get("/ui/sign-in").status_code) == (303, 200), "signing in is open"
            assert site.http.get("/healthz").status_code == 200

    def test_guesses_are_limited(self, serve: Any, tmp_path: Path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP) as site:
            used = made(site, "ada", "read")

            def status(token: str, address: str = "192.0.2.1", path: str = "/jobs") -> int:
                return site.http.get(path, headers={**bearer(token), "X-Forwarded-For": address}).status_code

            def signed_in(token: str, address: str) -> httpx.Response:
                sent = {"data": {"token": token}, "headers": {"X-Forwarded-For": address}}
                return site.http.post("/ui/sign-in", **sent)

            assert status(BOOTSTRAP) == 200
            guesses = [status(f"guess {number}") for number in range(90)]
            assert guesses == [401] * guard.GUESSES + [429] * (90 - guard.GUESSES)
            assert status("guess 1") == 401, "the same wrong token again is no guess"
            assert (status(used), status(BOOTSTRAP)) == (200, 200), "those who were here go on"
            assert (status(made(site, "new", "read")), status(mint()[1])) == (200, 401), "nobody guesses these"
            assert (status("guess 91", path="/ui/sign-in"), status(BOOTSTRAP, "192.0.2.2")) == (200, 200)
            page = signed_in("guess 92", "192.0.2.1")
            assert (page.status_code, "wrong tokens a minute" in page.text) == (429, True)
            assert page.headers["retry-after"].isdigit()
            assert signed_in(used, "192.0.2.1").status_code == 303

    @pytest.mark.parametrize(
        ("proxies", "believed"), [(None, True), ("", False), ("192.0.2.0/24", False), ("192.0.2.1, 127.0.0.0/8", True)]
    )
    def test_only_trusted_proxies_are_believed(self, serve, tmp_path, proxies, believed) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP, trusted_proxies=proxies) as site:
            used = made(site, "ada", "read")

            def guess(number: int) -> int:
                headers = {**bearer(f"guess {number}"), "X-Forwarded-For": f"198.51.100.{number}"}
                return site.http.get("/jobs", headers=headers).status_code

            assert (429 in [guess(number) for number in range(guard.GUESSES + 1)]) != believed
            forged = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "198.51.100.200"}
            cookie = site.http.post("/ui/sign-in", data={"token": used}, headers=forged).headers["set-cookie"]
            assert ("Secure" in cookie) == believed

    def test_guesses_from_many_addresses_are_limited(self) -> None:
        now = 0.0
        one = guard.GuessLimit(lambda: now)
        for number in range(guard.ALL_GUESSES):
            one.check(b"%d" % number, f"2001:db8:{number:x}::1")
            one.note(b"%d" % number, f"2001:db8:{number:x}::1", wrong=True)
        with pytest.raises(TooManyRequests, match=r"60 different wrong tokens a minute: wait 1 s"):
            one.check(b"another", "192.0.2.1")
        now += 1.0
        one.check(b"another", "192.0.2.1")

    @pytest.mark.parametrize(
        ("addresses", "networks"),
        [
            (("192.0.2.1", "::ffff:192.0.2.1"), {"192.0.2.1"}),
            (("2001:db8::1", "2001:db8::ffff", "2001:db8:0:1::1"), {"2001:db8::/64", "2001:db8:0:1::/64"}),
            (("", "unknown", "x" * 60_000), {""}),
        ],
        ids=("IPv4", "IPv6", "none"),
    )
    def test_what_counts_as_one_sender(self, addresses: tuple[str, ...], networks: set[str]) -> None:
        assert {guard.network_of(address) for address in addresses} == networks

    def test_too_many_queued_jobs_are_answered_429(self, serve: Any, tmp_path: Path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP, max_queued_jobs=2) as site:
            ada, bob = made(site, "ada", "submit"), made(site, "bob", "submit")

            def submit(token: str, **headers: str) -> httpx.Response:
                return site.http.post("/jobs", json={"spec": TINY}, headers={**bearer(token), **headers})

            first = submit(ada, **{"Idempotency-Key": "first"}).json()["id"]
            assert submit(ada).status_code == 201
            full = submit(ada)
            assert "ada has 2 queued jobs" in refused(full, 429, "queue_full")["detail"]
            assert full.headers["retry-after"].isdigit()
            assert submit(ada, **{"Idempotency-Key": "first"}).json()["id"] == first, "the first answer stands"
            sweep = {"base": TINY, "grid": {"seed": [1, 2, 3]}}
            for path in ("/sweeps", "/sweeps?dry_run=true"):
                refused(site.http.post(path, json=sweep, headers=bearer(bob)), 429, "queue_full")
            for token, code in ((ada, 429), (bob, 200)):
                dry = site.http.post("/jobs?dry_run=true", json={"spec": TINY}, headers=bearer(token))
                assert dry.status_code == code, dry.text
            assert submit(bob).status_code == 201
            site.http.post(f"/jobs/{first}/cancel", headers=bearer(ada)).raise_for_status()
            assert submit(ada).status_code == 201
            refused(site.http.post(f"/jobs/{first}/retry", headers=bearer(ada)), 429, "queue_full")

    def test_many_at_once_do_not_exceed_the_limit(self, serve: Any, tmp_path: Path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP, max_queued_jobs=5) as site:
            ada = bearer(made(site, "ada", "submit"))

            def submit(_number: int) -> int:
                return int(site.http.post("/jobs", json={"spec": TINY}, headers=ada).status_code)

            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(submit, range(16)))
            assert sorted(answers) == [201] * 5 + [429] * 11
            assert len(site.http.get("/jobs?state=queued", headers=ada).json()["data"]) == 5

    def test_a_sweep_that_is_resumed_does_not_exceed_the_limit(self, serve: Any, tmp_path: Path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP, max_queued_jobs=3) as site:
            ada = bearer(made(site, "ada", "submit"))
            body = {"base": TINY, "grid": {"seed": [1, 2, 3]}}
            sweep = site.http.post("/sweeps", json=body, headers=ada).json()["id"]
            site.http.post(f"/sweeps/{sweep}/cancel", headers=ada).raise_for_status()
            job = site.http.post("/jobs", json={"spec": TINY}, headers=ada).json()["id"]
            full = refused(site.http.post(f"/sweeps/{sweep}/resume", headers=ada), 429, "queue_full")
            assert "ada has 1 queued jobs, and 3 more would exceed 3" in full["detail"]
            assert len(site.http.get(f"/jobs?sweep={sweep}", headers=ada).json()["data"]) == 3, "nothing was stored"
            site.http.post(f"/jobs/{job}/cancel", headers=ada).raise_for_status()
            assert site.http.post(f"/sweeps/{sweep}/resume", headers=ada).status_code == 202


class TestSessions:
    """What a browser does; tests/browser/test_sign_in.py does it in one."""

    def sign_in(self, site: Any, token: str, wanted: str = "/ui/workers", **headers: str) -> httpx.Response:
        with httpx.Client(base_url=site.url, trust_env=False) as browser:
            return browser.post("/ui/sign-in", data={"token": token, "next": wanted}, headers=headers)

    def test_a_form_that_is_too_long(self, guarded: Any) -> None:
        assert self.sign_in(guarded, "x" * MAX_FORM_BYTES).status_code == 413

    def cookie(self, site: Any, token: str) -> dict[str, str]:
        return {"Cookie": self.sign_in(site, token).headers["set-cookie"].partition(";")[0]}

    def test_the_cookie_shows_no_token_to_pages_and_other_sites(self, guarded: Any, tokens: dict[Scope, str]) -> None:
        answer = self.sign_in(guarded, tokens["read"])
        assert tokens["read"] not in answer.text + str(answer.headers)
        assert sorted(answer.headers["set-cookie"].split("; ")[1:]) == ["HttpOnly", "Path=/", "SameSite=strict"]
        wrong = self.sign_in(guarded, "hunter2")
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        assert "What was sent is no token." in wrong.text
        assert "hunter2" not in wrong.text

    def test_servers_of_one_host_have_a_session_each(self, guarded, tokens, serve, tmp_path) -> None:
        with serve(tmp_path, api_token=BOOTSTRAP) as other, httpx.Client(trust_env=False) as browser:
            for site, token in ((guarded, tokens["read"]), (other, BOOTSTRAP)):
                browser.post(f"{site.url}/ui/sign-in", data={"token": token})
            assert [browser.get(f"{site.url}/jobs").status_code for site in (guarded, other)] == [200, 200]

    def test_the_session_has_the_tokens_scope(self, guarded: Any, tokens: dict[Scope, str]) -> None:
        cookie = self.cookie(guarded, tokens["read"])
        page = guarded.http.get("/ui", headers=cookie)
        assert page.status_code == 200
        assert "Sign out (read)" in page.text
        assert "Sign out" not in guarded.http.get("/ui", headers={**cookie, "HX-Request": "true"}).text  # it is shared
        assert "Sign out" not in guarded.http.get("/ui", headers=bearer(tokens["read"])).text
        demo = guarded.http.post("/ui/demo", headers={**cookie, **FORM, "Origin": guarded.url})
        assert demo.status_code == 403
        assert "<code>submit</code>" in demo.text

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 403),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Sec-Fetch-Site": "same-site", "Origin": "{url}"}, 403),
            ({"Referer": "{url}/ui"}, 303),
        ],
        ids=str,
    )
    def test_another_site_changes_nothing(self, guarded, tokens, headers, status) -> None:
        sent = {name: value.replace("{url}", guarded.url) for name, value in headers.items()}
        before = guarded.rows()["job"]
        cookie = self.cookie(guarded, tokens["submit"])
        content = b"kind=benchmark&spec.model.size=tiny"
        assert guarded.http.post("/ui/new", content=content, headers={**cookie, **FORM, **sent}).status_code == status
        assert guarded.rows()["job"] == before + (status == 303)

    def test_a_page_of_somebody_else_is_not_kept(self, guarded: Any, ada: str, bob: str) -> None:
        job = guarded.http.post("/jobs", json={"spec": TINY}, headers=bearer(ada)).json()["id"]
        guarded.http.post(f"/jobs/{job}/cancel", headers=bearer(ada)).raise_for_status()
        page, cookie = f"/ui/jobs/{job}", self.cookie(guarded, ada)
        known = {"If-None-Match": guarded.http.get(page, headers=cookie).headers["etag"]}
        assert guarded.http.get(page, headers={**cookie, **known}).status_code == 304
        assert "Sign out (bob)" in guarded.http.get(page, headers={**self.cookie(guarded, bob), **known}).text

    def test_signing_out_ends_the_session(self, guarded: Any, tokens: dict[Scope, str]) -> None:
        cookie = self.cookie(guarded, tokens["read"])
        assert guarded.http.post("/ui/sign-out", headers={**cookie, "Origin": "http://evil.example"}).status_code == 403
        assert guarded.http.get("/jobs", headers=cookie).status_code == 200
        answer = guarded.http.post("/ui/sign-out", headers={**cookie, "Origin": guarded.url})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sign-in")
        assert "Max-Age=0" in answer.headers["set-cookie"]
        refused(guarded.http.get("/jobs", headers=cookie), 401, "unauthorized")

    def test_a_session_ends_with_its_token_and_its_time(self, guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        token = made(guarded, "carol", "read")
        cookie, short = self.cookie(guarded, token), self.cookie(guarded, BOOTSTRAP)
        assert guarded.http.get("/jobs", headers=cookie).status_code == 200
        guarded.http.delete(f"/tokens/{token.split('_')[1]}", headers=bearer(BOOTSTRAP)).raise_for_status()
        refused(guarded.http.get("/jobs", headers=cookie), 401, "unauthorized")
        assert guarded.http.get("/tokens", headers=short).status_code == 200
        later = time.monotonic() + guard.SESSION_S
        monkeypatch.setattr(guarded.services.guard, "_clock", lambda: later)
        monkeypatch.setattr(guarded.services.guard, "_read_at", later)
        refused(guarded.http.get("/jobs", headers=short), 401, "unauthorized")

    @pytest.mark.parametrize("wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "", "/\n/x"])
    def test_it_leads_to_no_other_site(self, guarded: Any, tokens: dict[Scope, str], wanted: str) -> None:
        assert self.sign_in(guarded, tokens["read"], wanted).headers["location"] == "/ui"

    def test_a_browser_is_sent_to_sign_in(self, guarded: Any, tokens: dict[Scope, str]) -> None:
        answer = guarded.http.get("/ui?state=queued&label=a:b", headers={"Accept": "text/html"})
        assert answer.status_code == 303
        form = guarded.http.get(answer.headers["location"])
        assert 'value="/ui?state=queued&amp;label=a:b"' in form.text
        assert 'http-equiv="refresh"' not in form.text
        elsewhere = guarded.http.get(answer.headers["location"], headers={"Sec-Fetch-Site": "cross-site"})
        assert '<meta http-equiv="refresh" content="0; url=/ui?state=queued&amp;label=a:b">' in elsewhere.text
        part = guarded.http.get("/ui", headers={"Accept": "text/html", "HX-Request": "true"})
        assert (part.status_code, part.headers["hx-refresh"]) == (401, "true")

    def test_an_open_server_needs_no_sign_in(self, site: Any) -> None:
        answer = site.http.get("/ui/sign-in", params={"next": "/ui/workers"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/workers")

    def test_sessions_are_bounded(self, guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard, "MAX_SESSIONS", 3)
        one = Guard(Settings(api_token=SecretStr(BOOTSTRAP)), guarded.services.access_tokens)
        first, *others = (one.begin_session(Access("admin")) for _ in range(4))
        assert [one.by_session(cookie).scope for cookie in others] == ["admin"] * 3
        with pytest.raises(Unauthorized):
            one.by_session(first)
        for _ in range(9):
            one.begin_session(Access("read", "eve", "0123456789"))
        assert one.by_session(others[0]).scope == "admin", "another token's sign-ins end no session"


def followed(site: Any, headers: dict[str, str], end: Callable[[], object]) -> float:
    """Seconds from `end` to the end of a queued job's stream with these headers; nothing else happens to the job."""
    job = site.http.post("/jobs", json={"spec": TINY}, headers=bearer(BOOTSTRAP)).json()["id"]
    with site.http.stream("GET", f"/jobs/{job}/events", headers={**headers, **STREAM}, timeout=30) as response:
        assert response.status_code == 200
        stream = parse_stream(response.iter_lines())
        next(stream)
        end()
        began = time.monotonic()
        assert list(stream) == []
        return time.monotonic() - began


class TestStreams:
    @pytest.fixture(autouse=True)
    def _no_keep_alive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(events, "QUEUED_KEEP_ALIVE_S", 3600.0)
        monkeypatch.setattr(events, "KEEP_ALIVE_S", 3600.0)

    def revoke(self, site: Any, token: str) -> None:
        path = f"/tokens/{token.split('_')[1]}"
        with httpx.Client(base_url=site.url, trust_env=False) as other:
            other.delete(path, headers=bearer(BOOTSTRAP)).raise_for_status()

    def test_revoking_and_signing_out_end_a_sessions_stream(self, guarded: Any) -> None:
        token = made(guarded, "ada", "read")
        one, other = (TestSessions().cookie(guarded, token) for _ in range(2))

        def sign_out() -> None:
            headers = {**one, "Origin": guarded.url}
            with httpx.Client(base_url=guarded.url, trust_env=False) as browser:
                assert browser.post("/ui/sign-out", headers=headers).status_code == 303

        assert followed(guarded, one, sign_out) < 5
        assert followed(guarded, other, lambda: self.revoke(guarded, token)) < 5

    def test_another_servers_revocation_ends_it_with_the_next_sign_of_life(self, guarded, monkeypatch) -> None:
        monkeypatch.setattr(events, "QUEUED_KEEP_ALIVE_S", 0.05)
        token = made(guarded, "ada", "read")
        assert followed(guarded, bearer(token), lambda: guarded.services.access_tokens.revoke(token.split("_")[1])) < 5


def test_no_token_reaches_the_log_or_the_database(serve, tmp_path, caplog, monkeypatch) -> None:
    caplog.set_level(logging.DEBUG)
    for client in ("httpx", "httpcore"):
        caplog.set_level(logging.WARNING, client)
    with serve(tmp_path, api_token=BOOTSTRAP) as site:
        logging.getLogger("uvicorn").addHandler(caplog.handler)
        token = made(site, "ada", "code")
        texts = []
        for headers in (bearer(token), bearer(token[:-1]), bearer(BOOTSTRAP), {"Authorization": token}):
            for method, path in (("GET", "/jobs"), ("GET", "/nothing"), ("POST", "/jobs"), ("PUT", "/queue/paused")):
                texts.append(site.http.request(method, path, content=b"{", headers=headers).text)
        answer = site.http.post("/ui/sign-in", data={"token": token})
        [session] = answer.cookies.values()
        cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
        site.http.cookies.clear()
        texts += [answer.text, site.http.get("/ui", headers=cookie).text]
        job = site.http.post("/jobs", json={"spec": TINY}, headers=bearer(token)).json()
        site.worker.register()
        site.worker.finish(site.worker.claim())
        texts += [site.http.get(f"/jobs/{job['id']}{part}", headers=cookie).text for part in ("", "/events")]

        def fail(_database: Any) -> Any:
            raise RuntimeError("nobody foresaw it")

        monkeypatch.setattr(monitoring, "read", fail)
        texts.append(site.http.get("/metrics", headers=bearer(token)).text)
    assert "nobody foresaw it" in caplog.text, "the log is caught"
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"ada" in stored
    for secret in (token, token[-72:-8], BOOTSTRAP, session):
        assert secret not in caplog.text
        assert secret not in "".join(texts)
        assert secret.encode() not in stored
