"""Answers of something else than a Flopwatch server, of a server that leads elsewhere, and answers without end."""

import contextlib
import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwatch import ClientError, DownloadFailed, Flopwatch, Refused, Unreachable, connection
from flopwatch.defaults import TIME

HTML = {"Content-Type": "text/html; charset=utf-8"}
JSON = {"Content-Type": "application/json"}
PAGE = b"<!doctype html><title>Sign in</title>"
Asked = list[tuple[str, str | None]]
"""The paths that were asked for, each with the token that came."""


@contextlib.contextmanager
def other(status: int, headers: dict[str, str], *body: bytes, asked: Asked | None = None) -> Iterator[str]:
    """A server that gives every request this answer, until its client leaves."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if asked is not None:
                asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for part in body:
                    self.wfile.write(part)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


CALLS: dict[str, Callable[[Flopwatch], object]] = {
    "list": lambda server: server.list_jobs(),
    "submit": lambda server: server.submit({"kind": "benchmark"}),
    "wait": lambda server: server.wait(1),
    "events": lambda server: list(server.events(1)),
    "logs": lambda server: server.logs(1),
    "table": lambda server: server.table_text(job=1),
    "download": lambda server: server.download(1),
    "cancel": lambda server: server.cancel(1),
    "delete": lambda server: server.delete(1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        (200, HTML, PAGE, r"answered 200 OK with a page for people"),
        (
            302,
            {"Location": "/oauth2/start?rd=x"},
            b"",
            r"302 Found: it leads to http://127[^ ]+/oauth2/start, perhaps a",
        ),
        (403, HTML, PAGE, r"answered 403 Forbidden\.\n  That is not Flopwatch"),
        (404, JSON, b'{"detail": "Not Found"}', r"answered 404 Not Found\.\n  That is not Flopwatch"),
    ],
    ids=str,
)
def test_every_call_says_who_answers(call: str, status: int, headers: dict[str, str], body: bytes, said: str) -> None:
    with other(status, headers, body) as url, Flopwatch(url) as server:
        with pytest.raises(Unreachable if status < 400 else Refused, match=said) as caught:
            CALLS[call](server)
        assert "FLOPWATCH_URL" in str(caught.value)


@pytest.mark.parametrize("body", [b"{nope", b"[1]", b"1", b"", b"\xff"])
def test_no_object_is_no_answer(body: bytes) -> None:
    with (
        other(200, JSON, body) as url,
        Flopwatch(url) as server,
        pytest.raises(Unreachable, match=r"with no JSON object \(application/json\)"),
    ):
        server.list_jobs()


def test_a_redirect_to_https_names_the_address() -> None:
    with (
        other(301, {"Location": "https://flopwatch.example.org/jobs?limit=50"}) as url,
        Flopwatch(url) as server,
        pytest.raises(Unreachable, match=r"say so: FLOPWATCH_URL=https://flopwatch\.example\.org, or --url"),
    ):
        server.list_jobs()


def test_an_address_that_was_copied_from_a_browser(site: Any) -> None:
    job = site.submit()["id"]
    with Flopwatch(f"{site.url}/ui") as server, pytest.raises(ClientError, match=rf"FLOPWATCH_URL={site.url}, or"):
        server.job(job)


@pytest.mark.parametrize("leads", ["http://127.0.0.1:{port}", "http://localhost:{port}", "https://evil.example"])
def test_no_other_origin_gets_the_token(tmp_path: Path, leads: str) -> None:
    asked: Asked = []
    content = b"stolen"
    with other(200, {}, content, asked=asked) as elsewhere:
        away = leads.replace("{port}", elsewhere.rpartition(":")[2]) + "/file"
        file = {"name": "x", "url": away, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        with other(200, JSON, json.dumps({"data": [file]}).encode()) as url, Flopwatch(url, token="t") as server:
            with pytest.raises(ClientError, match="leads away from"):
                server.download(1, to=tmp_path)
            with pytest.raises(ClientError, match="leads away from"):
                server.send("GET", away)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_the_token_goes_to_its_server(tmp_path: Path) -> None:
    """The control of the former test: an absolute address of the server itself."""
    asked: Asked = []
    content = b"mine"
    with other(200, {}, content, asked=asked) as url, Flopwatch(url, token="t") as server:
        file = {"name": "x", "url": f"{url}/file", "sha256": hashlib.sha256(content).hexdigest(), "size": 4}
        server.download_file(file, tmp_path / "x")
    assert asked == [("/file", "Bearer t")]
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize(
    ("call", "packed"), [("list", True), ("table", False), ("events", True), ("logs", True), ("logs", False)]
)
def test_an_answer_has_a_limit(call: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_ANSWER_BYTES", 1 << 20)
    kind = "text/event-stream" if call == "events" else "application/json"
    body = b" " * (4 << 20)
    headers = {"Content-Type": kind, **({"Content-Encoding": "gzip"} if packed else {}), TIME: "2026-01-01T00:00:00Z"}
    parts = [gzip.compress(body)] if packed else [body[: 1 << 16]] * 64
    with (
        other(200, headers, *parts) as url,
        Flopwatch(url) as server,
        pytest.raises(ClientError, match="answers with more than 1 MiB"),
    ):
        CALLS[call](server)
    monkeypatch.undo()
    short = b'{"data": [], "next": null}'
    with other(200, JSON, short) as url, Flopwatch(url) as server:
        assert server.list_jobs() == []


def test_a_file_has_its_size(tmp_path: Path) -> None:
    file = {"name": "x", "url": "/file", "sha256": "0" * 64, "size": 10}
    with (
        other(200, {}, *[b"x" * 65_536] * 1000) as url,
        Flopwatch(url) as server,
        pytest.raises(DownloadFailed, match="arrived damaged"),
    ):
        server.download_file(file, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
