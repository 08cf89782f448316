"""What is hardly HTTP, sent to a real server: it goes on, and stores nothing.

Requests with wrong fields are in tests/app/api/test_problems.py, random ones in tests/app/api/test_fuzz.py.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.acceptance.faults import TINY, database_path, http_client, state_of
from tools.service import Service

pytestmark = pytest.mark.acceptance

LIMIT_BYTES = 64 << 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One server for all of these, with one job in it."""
    with Service(tmp_path_factory.mktemp("service"), {"FLOPWATCH_MAX_BODY_BYTES": str(LIMIT_BYTES)}) as running:
        running.start_server().post("/jobs", json={"spec": TINY}).raise_for_status()
        yield running
        assert "Traceback" not in running.logs(), running.logs()


RAW = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no host": b"POST /jobs HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunk": b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "long header": b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
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
