"""Answers of something else than a Flopwatch server, and of a server that leads elsewhere."""

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
    "events": lambda server: list(server.events(1)),
    "logs": lambda server: server.logs(1),
}


@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        (200, HTML, PAGE, r"answered 200 OK: no JSON object, but text/html"),
        (302, {"Location": "https://elsewhere.example/"}, b"", "302 Found: it leads to https://elsewhere.example/"),
        (403, HTML, PAGE, r"answered 403 Forbidden\.\n  That is not Flopwatch"),
        (404, JSON, b'{"detail": "Not Found"}', r"answered 404 Not Found\.\n  That is not Flopwatch"),
    ],
    ids=str,
)
def test_calls_say_who_answers(status: int, headers: dict[str, str], body: bytes, said: str) -> None:
    with other(status, headers, body) as url, Flopwatch(url) as server:
        for call in CALLS.values():
            with pytest.raises(Unreachable if status < 400 else Refused, match=said) as caught:
                call(server)
            assert "FLOPWATCH_URL" in str(caught.value)


def test_no_object_is_no_answer() -> None:
    for body in (b"{nope", b"[1]", b""):
        with other(200, JSON, body) as url, Flopwatch(url) as server, pytest.raises(Unreachable, match="no JSON obj"):
            server.list_jobs()


@pytest.mark.parametrize("leads", ["http://127.0.0.1:{port}", "http://localhost:{port}"])
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


def test_the_token_goes_to_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the former test: an absolute address of the server itself. No proxy reaches this host."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    asked: Asked = []
    content = b"mine"
    with other(200, {}, content, asked=asked) as url, Flopwatch(url, token="tü") as server:
        file = {"name": "x", "url": f"{url}/file", "sha256": hashlib.sha256(content).hexdigest(), "size": 4}
        server.download_file(file, tmp_path / "x")
    assert [(path, str(token).encode("latin-1").decode()) for path, token in asked] == [("/file", "Bearer tü")]
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("packed", [True, False])
def test_an_answer_has_a_limit(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_ANSWER_BYTES", 1 << 20)
    body = b" " * (4 << 20)
    with (
        other(
            200, JSON | ({"Content-Encoding": "gzip"} if packed else {}), gzip.compress(body) if packed else body
        ) as url,
        Flopwatch(url) as server,
        pytest.raises(ClientError, match="answers with more than 1 MiB"),
    ):
        server.list_jobs()


def test_a_file_has_its_size(tmp_path: Path) -> None:
    file = {"name": "x", "url": "/file", "sha256": "0" * 64, "size": 10}
    with (
        other(200, {}, *[b"x" * 65_536] * 1000) as url,
        Flopwatch(url) as server,
        pytest.raises(DownloadFailed, match="arrived damaged"),
    ):
        server.download_file(file, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
