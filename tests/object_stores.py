"""An S3 server of moto on loopback, and a network to it that a test can cut."""

import contextlib
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

SERVE = """
import sys
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
server = make_server(sys.argv[1], 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""
SOMEBODY = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
"""moto asks who somebody is, and believes it."""
SECRET = "the-secret-of-a-test"


@contextlib.contextmanager
def serving_objects(address: str = "127.0.0.1") -> Iterator[int]:
    """Run moto's server; its port."""
    command = [sys.executable, "-c", SERVE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


@dataclass
class Network:
    """Passes connections on to a port, until it is cut or loses answers."""

    target: int
    address: str = "127.0.0.1"
    """Of the server."""
    is_cut: bool = False
    lost_answers: int = 0
    """The answers to PUT that are lost from now on, after the server has done what was asked."""
    cut_after: float = float("inf")
    """Bytes of requests after which it is cut."""
    on_request: Callable[[bytes], object] = lambda _line: None
    """Called with the first bytes of each request, before they are passed on."""
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = {self._listener}
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        self.is_cut = True
        for connection in self._open - {self._listener}:
            _end(connection)

    def mend(self) -> None:
        self.is_cut, self.cut_after = False, float("inf")

    def close(self) -> None:
        for connection in set(self._open):
            _end(connection)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_cut:
                    client.close()
                    continue
                server = socket.create_connection((self.address, self.target))
                self._open |= {client, server}
                asked: list[bytes] = [b""]
                for pump in (self._requests, self._answers):
                    threading.Thread(target=pump, args=(client, server, asked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if data.startswith((b"PUT ", b"GET ", b"HEAD ", b"POST ", b"DELETE ")):
                    asked[0] = data
                    self.on_request(data)
                self.cut_after -= len(data)
                if self.cut_after < 0:
                    self.cut()
                server.sendall(data)
        _end(server)

    def _answers(self, client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if self.lost_answers and asked[0].startswith(b"PUT "):
                    self.lost_answers -= 1
                    _end(server)
                    break
                client.sendall(data)
        _end(client)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass
class PlainBucket:
    """A bucket of a test's own on the server at an address."""

    name: str
    server: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/prefix"

    @property
    def endpoint(self) -> str:
        """Where obstore finds the server."""
        return self.server

    def environment(self) -> dict[str, str]:
        """The variables with which obstore reaches it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.endpoint}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def request(self, method: str, path: str = "", content: bytes | None = None) -> str:
        url = f"http://{self.server}/{self.name}/{path}"
        answer = httpx.request(method, url, content=content, headers=SOMEBODY, trust_env=False)
        assert answer.status_code in (200, 204), answer.text
        return answer.text

    def names(self) -> set[str]:
        """The objects of files, whole names."""
        keys = {key.partition("<")[0] for key in self.request("GET").split("<Key>")[1:]}
        return {key for key in keys if not key.endswith(("/probe", "/owner.json"))}


@dataclass
class Bucket(PlainBucket):
    """A bucket that is reached through a network of its own."""

    network: Network

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.network.port}"


@contextlib.contextmanager
def new_bucket(port: int) -> Iterator[Bucket]:
    network = Network(port)
    bucket = Bucket(f"bucket-{secrets.token_hex(4)}", f"127.0.0.1:{port}", network)
    bucket.request("PUT")
    try:
        yield bucket
    finally:
        network.close()
