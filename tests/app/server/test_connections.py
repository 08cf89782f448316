"""Clients that open connections and never send a whole request, in numbers that take every file of the server."""

import contextlib
import os
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.server.connections import MIN_CONNECTIONS, RESERVED_FILES, connections_within_files
from tests.app.conftest import TINY
from tests.databases import put_database
from tests.forked import PLUGINS, forkserver
from tools.waiting import wait_until

FILES = 400
HALF_OPEN = 700
PROMPT_S = 3.0
"""A refused client waits for ever; an answer takes milliseconds, or longer on a busy host."""
LOG_BYTES = 20_000
FLOODED_S = 1.0
CONTROL_S = 30.0
"""For what must happen without the mechanism, and does at once where nobody else has the processors."""
PAUSE_S = 0.5
"""Between two rounds over all of them: what is tried here is their number, not how busy one client makes the server."""

LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES // 2}, {FILES}))"
NO_CAP = (
    "from app.server import connections; "
    "connections.connections_within_files = lambda wanted, f=connections.connections_within_files: f(wanted) + 10_000"
)
NO_RATE_LIMIT = "from app.logs import RateLimit; RateLimit.filter = lambda self, record: True"

BEGINNINGS = (
    b"",
    b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{",
)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=10)
        connection.sendall(sent)
        return connection


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server that may open FILES files, and takes so long a request; `sabotage` runs in it before."""
    processes = []

    def start(sabotage: str = "pass", **settings: str) -> Server:
        log = tmp_path / "log"
        log.touch()
        put_database(tmp_path / "data")
        process = forkserver().start(
            ["-m", "app.cli", "serve", "--port", "0"],
            {
                **os.environ,
                "PYTHONPATH": str(PLUGINS),
                "PYTHONUNBUFFERED": "1",
                "FLOPWATCH_DATA_DIR": str(tmp_path / "data"),
                **settings,
            },
            log,
            before=f"{LIMITED}; {sabotage}",
        )
        processes.append(process)
        found = wait_until(lambda: re.search(rb"listening on (http://\S+)", log.read_bytes()), "the server", 60)
        return Server(process, log, found[1].decode())

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open the sockets of the flood."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * HALF_OPEN + FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(server: Server, wanted: str = "", within_s: float = FLOODED_S) -> list[str]:
    """Hold 700 half-open connections, dripping, and replaced when ended; what others suffered until one such thing."""
    found: list[str] = []
    all_there, stopped = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=5, trust_env=False))
        job_id = client.post("/jobs", json={"spec": TINY}).json()["id"]
        headers = {"Accept": "text/event-stream"}
        lines = stack.enter_context(client.stream("GET", f"/jobs/{job_id}/events", headers=headers)).iter_lines()
        next(lines)
        assert client.get("/jobs").status_code == 200

        def attack() -> None:
            sockets: dict[int, socket.socket] = {}
            with contextlib.ExitStack() as closing:
                while not stopped.is_set():
                    for number in range(HALF_OPEN):
                        try:
                            if number not in sockets:
                                made = closing.enter_context(socket.create_connection(server.address, timeout=0.2))
                                made.setblocking(False)
                                sockets[number] = made
                                made.send(BEGINNINGS[number % len(BEGINNINGS)])
                            elif number % len(BEGINNINGS):
                                sockets[number].send(b" ")
                        except OSError:
                            if (ended := sockets.pop(number, None)) is not None:
                                ended.close()
                        if stopped.is_set():
                            return
                    all_there.set()
                    time.sleep(PAUSE_S)

        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            assert all_there.wait(60)
            deadline = time.monotonic() + within_s
            while not any(one.startswith(wanted) for one in found) and time.monotonic() < deadline:
                found += slow(server, "/healthz") + slow(server, "/jobs")
                if (size := server.log.stat().st_size) > LOG_BYTES:
                    found.append(f"log: {size} bytes")
        finally:
            stopped.set()
            attacker.join()
        try:
            client.post(f"/jobs/{job_id}/cancel")
            if not any("cancelled" in line for line in lines):
                found.append("the stream ended")
        except httpx.TransportError as error:
            found.append(f"the stream: {error!r}")
    return found


def slow(server: Server, path: str) -> list[str]:
    """Why a new client is not content."""
    started = time.monotonic()
    connection = HTTPConnection(*server.address, timeout=PROMPT_S)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return [f"GET {path}: {error!r}"]
    finally:
        connection.close()
    took_s = time.monotonic() - started
    return [] if status == 200 and took_s < PROMPT_S else [f"{status} after {took_s:.1f} s: GET {path}"]


@pytest.mark.alone
@pytest.mark.usefixtures("many_files")
def test_half_open_connections_do_not_affect_others(run: Any) -> None:
    server = run()
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (FILES, FILES), "the limit is raised"
    assert flood(server) == []


@pytest.mark.long
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(("sabotage", "wrong"), [(NO_CAP, "GET /healthz"), (f"{NO_CAP}; {NO_RATE_LIMIT}", "log")])
def test_control_of_the_flood(run: Any, sabotage: str, wrong: str) -> None:
    found = flood(run(sabotage), wrong, CONTROL_S)
    assert any(one.startswith(wrong) for one in found)
    assert wrong == "log" or not any(one.startswith("log") for one in found), "its errors are of one kind"


def test_a_request_has_a_time_to_arrive_in(run: Any) -> None:
    server = run(FLOPWATCH_REQUEST_TIMEOUT_S="1")
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        job_id = client.post("/jobs", json={"spec": TINY}).json()["id"]
        headers = {"Accept": "text/event-stream"}
        with client.stream("GET", f"/jobs/{job_id}/events", headers=headers) as stream:
            lines = stream.iter_lines()
            next(lines)
            for beginning in BEGINNINGS:
                started = time.monotonic()
                with server.connect(beginning) as connection:
                    assert ended(connection, drip=bool(beginning)), beginning
                    assert 0.5 < time.monotonic() - started < 5, beginning
            client.post(f"/jobs/{job_id}/cancel")
            assert any("cancelled" in line for line in lines), "an answer may take as long as it likes"


def ended(connection: socket.socket, *, drip: bool) -> bool:
    """Whether the server ends the connection, although a byte comes every tenth of a second."""
    connection.settimeout(0.1)
    for _ in range(100):
        try:
            if drip:
                connection.send(b"a")
            received = connection.recv(1000)
        except TimeoutError:
            continue
        except OSError:
            return True
        named = received.startswith(b"HTTP/1.1 408 ") and b"FLOPWATCH_REQUEST_TIMEOUT_S" in received
        assert not received or named
        return True
    return False


def test_requests_in_a_row_on_one_connection(run: Any) -> None:
    """Each has its own time, whether it is sent with the one before or late."""
    server = run(FLOPWATCH_REQUEST_TIMEOUT_S="3")
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with server.connect(request + request) as connection:
        received = b""
        for count in range(2, 7):
            while received.count(b'{"status":"ok",') < count:
                more = connection.recv(10_000)
                assert more, received
                received += more
            time.sleep(0.8)
            connection.sendall(request[:10])
            connection.sendall(request[10:])


@pytest.mark.parametrize(
    ("limits", "wanted", "expected"),
    [
        ((1024, 1 << 20), 2000, 2000),
        ((256, 1024), 2000, 1024 - RESERVED_FILES),
        ((256, 256), 2000, MIN_CONNECTIONS),
        ((1024, 1024), 100, 100),
        ((1024, resource.RLIM_INFINITY), 2000, 2000),
    ],
)
def test_connections_leave_files_to_the_others(monkeypatch, limits, wanted, expected) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _which, made: raised.append(made))
    assert connections_within_files(wanted) == expected
    assert raised == [(limits[1], limits[1])]
