"""Webhooks, at a real receiver that verifies signatures with the library of Standard Webhooks."""

import asyncio
import base64
import http.server
import ipaddress
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from standardwebhooks import Webhook

from app.api import notifying
from app.store import tables
from app.store.queue import webhooks
from app.store.queue.webhooks import Delivery
from app.store.tables import utc_now
from tools.waiting import wait_until

SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
LOOPBACK = {"notify_secret": SECRET, "notify_networks": ["127.0.0.0/8"]}


@dataclass
class Receiver:
    """What arrived, and with what status each delivery is answered; 200 once they are used up."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    speak_tls: Callable[[ssl.SSLContext], None] = lambda _context: None
    """Called before anything is sent."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    got = Receiver()
    got.answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.paths.append(self.path)
            got.hosts.append(self.headers["Host"])
            got.ids.append(self.headers["webhook-id"])
            got.messages.append(Webhook(SECRET).verify(body, dict(self.headers.items())))
            got.answers.wait(20)
            self.send_response(got.statuses.pop(0) if got.statuses else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:

        def speak_tls(context: ssl.SSLContext) -> None:
            server.socket = context.wrap_socket(server.socket, server_side=True)

        got.url, got.speak_tls = f"http://127.0.0.1:{server.server_port}/hook?key=1", speak_tls
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield got
        got.answers.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifying, "POLL_S", 0.02)
    monkeypatch.setattr(webhooks, "RETRY_AFTER_S", (0.02, 0.02, 0.02))


def told(site: Any, *, job: int | None = None, sweep: int | None = None) -> tuple[str, int]:
    """The state of a notification, and its tries, once it is not waited for any more."""
    hook = tables.webhook.c
    mine = hook.job_id == job if sweep is None else hook.sweep_id == sweep

    def ended() -> Any:
        with site.services.database.read() as connection:
            now = connection.execute(select(hook.state, hook.tries).where(mine)).one()
        return tuple(now) if now.state in ("delivered", "failed") else None

    return wait_until(ended, "the end to be told", 20)


def test_the_end_of_a_job_is_told_once(serve: Any, tmp_path: Path, receiver: Receiver) -> None:
    with serve(tmp_path, **LOOPBACK) as site:
        job = site.submit(name="nightly", labels={"a": "b"}, notify_url=receiver.url)
        site.submit()
        site.worker.finish(site.worker.claim(), "failed")
        site.worker.finish(site.worker.claim())
        assert told(site, job=job["id"]) == ("delivered", 1)
        (message,) = receiver.messages
        assert (message["type"], message["timestamp"]) == ("job.finished", site.job(job["id"])["finished_at"])
        known = {"id": job["id"], "kind": "benchmark", "name": "nightly", "labels": {"a": "b"}, "attempt": 1}
        assert message["data"] == {**known, "state": "failed", "error": {"code": "failed", "detail": "It broke."}}
        assert receiver.paths == ["/hook?key=1"]
        retried = site.http.post(f"/jobs/{job['id']}/retry")
        assert retried.status_code < 300, retried.text
        site.worker.finish(site.worker.claim())
        assert told(site, job=job["id"])[0] == "delivered"
        assert [one["data"]["state"] for one in receiver.messages] == ["failed", "succeeded"]
        assert len(set(receiver.ids)) == 2, "another end is another message"


def test_the_end_of_a_sweep_is_told_when_its_last_job_has_ended(serve: Any, tmp_path: Path, receiver: Receiver) -> None:
    with serve(tmp_path, **LOOPBACK) as site:
        body = {"base": {"kind": "benchmark"}, "grid": {"seed": [1, 2]}, "notify_url": receiver.url, "name": "s"}
        sweep = site.http.post("/sweeps", json=body).raise_for_status().json()["id"]
        site.worker.finish(site.worker.claim())
        assert site.services.webhooks.begin() == [], "one of its jobs is queued"
        site.worker.finish(site.worker.claim(), "failed")
        assert told(site, sweep=sweep)[0] == "delivered"
        (message,) = receiver.messages
        assert message["type"] == "sweep.finished"
        counts = message["data"]["counts"]
        assert (counts["succeeded"], counts["failed"]) == (1, 1)
        site.http.post(f"/sweeps/{sweep}/resume").raise_for_status()
        site.worker.finish(site.worker.claim())
        assert told(site, sweep=sweep)[0] == "delivered"
        assert receiver.messages[-1]["data"]["counts"]["succeeded"] == 2


def test_a_receiver_that_answers_500_twice(serve: Any, tmp_path: Path, receiver: Receiver) -> None:
    receiver.statuses = [500, 500]
    with serve(tmp_path, **LOOPBACK) as site:
        job = site.submit(notify_url=receiver.url)["id"]
        site.worker.finish(site.worker.claim())
        assert told(site, job=job) == ("delivered", 3)
    assert len(receiver.messages) == 3
    assert len(set(receiver.ids)) == 1, "by its id a receiver knows a message that comes again"


@pytest.mark.parametrize(
    ("status", "tries", "error"),
    [
        pytest.param(302, 4, "The receiver answered 302. Redirects are not followed", marks=pytest.mark.long),
        (410, 1, "The receiver answered 410."),
        (500, 4, "The receiver answered 500."),
    ],
)
def test_a_receiver_that_never_takes_it(serve, tmp_path, receiver, status, tries, error, caplog) -> None:
    receiver.statuses = [status] * 10
    with serve(tmp_path, **LOOPBACK) as site:
        job = site.submit(notify_url=receiver.url)["id"]
        site.worker.finish(site.worker.claim())
        assert told(site, job=job) == ("failed", tries)
    assert f"webhook job.finished of {job}, try {tries}: {error}" in caplog.text
    assert set(receiver.paths) == {"/hook?key=1"}


def test_a_receiver_that_does_not_answer(serve, tmp_path, receiver, monkeypatch, caplog) -> None:
    monkeypatch.setattr(notifying, "LIMIT_S", 0.3)
    receiver.answers.clear()
    with serve(tmp_path, **LOOPBACK) as site:
        job = site.submit(notify_url=receiver.url)["id"]
        site.worker.finish(site.worker.claim())
        assert told(site, job=job)[0] == "failed"
    assert ": The receiver did not answer within 0.3 s." in caplog.text


def test_private_addresses_are_refused(serve: Any, tmp_path: Path, receiver: Receiver, caplog: Any) -> None:
    """Written out, at the submission; behind a name, before anything is sent. In the other tests they are allowed."""
    with serve(tmp_path, notify_secret=SECRET) as site:
        answer = site.http.post("/jobs", json={"spec": {"kind": "benchmark"}, "notify_url": receiver.url})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/notify_url"
        assert "127.0.0.1 is no public address, and in none of FLOPWATCH_NOTIFY_NETWORKS" in error["detail"]
        job = site.submit(notify_url=receiver.url.replace("127.0.0.1", "localhost"))["id"]
        site.worker.finish(site.worker.claim())
        assert told(site, job=job) == ("failed", 1)
    assert "is no public address" in caplog.text
    assert receiver.paths == []


def test_a_server_without_a_secret(serve: Any, tmp_path: Path, receiver: Receiver) -> None:
    with serve(tmp_path, notify_networks=["127.0.0.0/8"]) as site:
        for route, body in (
            ("/jobs", {"spec": {"kind": "benchmark"}}),
            ("/sweeps", {"base": {"kind": "benchmark"}, "grid": {"seed": [1]}}),
        ):
            answer = site.http.post(route, json={**body, "notify_url": receiver.url})
            assert answer.status_code == 422
            assert "FLOPWATCH_NOTIFY_SECRET" in answer.json()["detail"]


@pytest.mark.parametrize(
    "url",
    ["ftp://example.org/", "https://", "https://user@example.org/", "https://example.org:0/", "http://[::1", "x", "",
     "https://example.org/ä", "https://example.org/#part", "http://example.org:99999/"],
)  # fmt: skip
def test_addresses_that_are_none(serve: Any, site: Any, url: str) -> None:
    answer = site.http.post("/jobs", json={"spec": {"kind": "benchmark"}, "notify_url": url})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/notify_url")
    assert "FLOPWATCH_NOTIFY_SECRET" not in answer.text


PUBLIC = ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8")
PRIVATE = ("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1",
           "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC + PRIVATE)
def test_which_addresses_are_public(address: str) -> None:
    place = ipaddress.ip_address(address)
    assert (notifying.why_refused(place, ()) is not None) == (address in PRIVATE)
    assert notifying.why_refused(place, [ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")]) is None


def resolve_to(monkeypatch: pytest.MonkeyPatch, answers: list[list[str]]) -> list[str]:
    """Let names have these addresses, one list for each question; returns the names that were asked for."""
    asked: list[str] = []

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


def sent(url: str, allowed: str = "127.0.0.1/32") -> int:
    message = Delivery(1, url, "msg_1", 0, {"type": "job.finished"})
    return asyncio.run(notifying.send(message, SECRET, [ipaddress.ip_network(allowed)]))


def test_a_name_that_changes_its_address_is_asked_for_once(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    asked = resolve_to(monkeypatch, [["127.0.0.1"], ["127.0.0.2"]])
    url = receiver.url.replace("127.0.0.1", "hook.example")
    assert sent(url) == 200
    assert asked == ["hook.example"]
    assert receiver.hosts == [url.split("/")[2]]


def test_one_private_address_among_several_is_enough(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, [["127.0.0.1", "10.0.0.1"]])
    with pytest.raises(notifying.Refused, match=r"10\.0\.0\.1"):
        sent(receiver.url.replace("127.0.0.1", "hook.example"))
    assert receiver.paths == []


@pytest.mark.parametrize("name", ["hook.example", "other.example"])
def test_the_certificate_is_that_of_the_name(name, receiver, tmp_path, monkeypatch) -> None:
    """And the name is asked for although the connection is to an address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=test", "-addext", "subjectAltName=DNS:hook.example"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    names: list[str | None] = []
    context.sni_callback = lambda _socket, asked, _context: names.append(asked)
    monkeypatch.setattr(
        httpx, "AsyncClient", partial(httpx.AsyncClient, verify=ssl.create_default_context(cafile=str(certificate)))
    )
    resolve_to(monkeypatch, [["127.0.0.1"]])
    receiver.speak_tls(context)
    url = receiver.url.replace("http://127.0.0.1", f"https://{name}")
    if name == "hook.example":
        assert sent(url) == 200
    else:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            sent(url)
    assert names == [name]
    assert len(receiver.messages) == (name == "hook.example")


def test_what_was_not_told_is_told_by_the_next_server(serve: Any, tmp_path: Path, receiver: Receiver) -> None:
    """The job ends while no server runs, or one dies amid the delivery."""
    with serve(tmp_path, **LOOPBACK) as site:
        first, second = (site.submit(notify_url=receiver.url)["id"] for _ in range(2))
        claim = site.worker.claim()
    with serve(tmp_path) as site:  # without a secret it delivers nothing
        site.worker.finish(claim)
        assert [one.message["data"]["id"] for one in site.services.webhooks.begin()] == [first]
        assert site.services.webhooks.begin() == [], "a server has begun it"
        site.worker.finish(site.worker.claim())
    later = utc_now() + timedelta(seconds=webhooks.TRY_S + 1)
    with pytest.MonkeyPatch.context() as patch, serve(tmp_path, **LOOPBACK) as site:
        assert told(site, job=second)[0] == "delivered"
        assert receiver.messages[0]["data"]["id"] == second, "the other is not due yet"
        patch.setattr(webhooks, "utc_now", lambda: later)
        assert told(site, job=first)[0] == "delivered"
