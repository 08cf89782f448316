"""The configurations of docs/reverse-proxy.md and deploy/nginx with the real proxies, in front of a real server."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.guard import GUESSES
from flopwatch import Flopwatch, Refused
from tests.app.api.streams import STREAM, parse_stream
from tests.app.conftest import TINY
from tools.waiting import wait_until

PAGE = Path(__file__).parents[3] / "docs/reverse-proxy.md"
NAME, TOKEN = "flopwatch.example.org", "a secret of the lab"
PROXIES = ("nginx", "caddy")


@pytest.fixture(scope="module")
def server(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with the page's settings."""
    with serve(tmp_path_factory.mktemp("behind"), allowed_hosts=NAME, api_token=TOKEN) as site:
        yield int(site.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def sign_on() -> Iterator[int]:
    """The port of a stand-in for oauth2-proxy: who has the cookie `person` is let in."""

    class SignOn(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            person = re.search(r"person=(\w+)", self.headers.get("Cookie", ""))
            if self.path != "/oauth2/auth":
                self.answer(403, b"<!doctype html><title>Sign in</title>")
            elif person is None:
                self.answer(401, b"")
            else:
                self.answer(202, b"", person[1])

        def answer(self, status: int, content: bytes, person: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            if person:
                self.send_header("X-Auth-Request-User", person)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), SignOn) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.server_address[1]
        listening.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def proxy(server: int, sign_on: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """Start a proxy of the page by its name, once; returns its port."""
    with contextlib.ExitStack() as stack:
        started: dict[str, int] = {}

        def start(name: str) -> int:
            if name not in started:
                started[name] = stack.enter_context(running(name, tmp_path_factory.mktemp(name), server, sign_on))
            return started[name]

        yield start


@contextlib.contextmanager
def running(name: str, folder: Path, server: int, sign_on: int) -> Iterator[int]:
    program = "caddy" if name == "caddy" else "nginx"
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if name == "caddy":
        _, caddy = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
        caddy = caddy.replace("127.0.0.1:8000", f"127.0.0.1:{server}")
        own = f"admin off\nlocal_certs\nskip_install_trust\nauto_https disable_redirects\nhttps_port {port}\n"
        (folder / "Caddyfile").write_text(f"{{\n{own}default_bind 127.0.0.1\n}}\n{caddy}")
        command = ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    else:
        file = "single-sign-on" if name == "single-sign-on" else "flopwatch"
        nginx = (PAGE.parents[1] / f"deploy/nginx/{file}.conf").read_text()
        nginx = nginx.replace("127.0.0.1:8000", f"127.0.0.1:{server}").replace(":4180", f":{sign_on}")
        nginx = nginx.replace("the admin's token", TOKEN)
        key = ["-keyout", folder / "flopwatch.key", "-out", folder / "flopwatch.pem", "-subj", f"/CN={NAME}"]
        subprocess.run(
            ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", *key], check=True, capture_output=True
        )
        nginx = nginx.replace("listen 443", f"listen 127.0.0.1:{port}").replace("/etc/ssl", str(folder))
        (folder / "nginx.conf").write_text(
            "daemon off; pid nginx.pid; error_log stderr; events {}\nhttp {\naccess_log off;\n"
            + "".join(f"{kind}_temp_path {kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
            + nginx
            + "}\n"
        )
        command = ["nginx", "-p", str(folder), "-c", "nginx.conf"]
    homes = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("w") as log, subprocess.Popen(command, env=os.environ | homes, stderr=log) as process:
        try:
            wait_until(lambda: answers(port), f"{name}: {(folder / 'log').read_text()}", 20.0)
            yield port
        finally:
            process.terminate()


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError), visitor(port) as one:
        return one.get("/healthz").status_code in (200, 403)
    return False


def visitor(port: int, address: str = "127.0.0.1") -> httpx.Client:
    """A client at an address, which trusts the proxy's certificate."""

    class Named(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.extensions["sni_hostname"] = NAME
            return super().handle_request(request)

    transport = Named(verify=False, local_address=address)
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", headers={"Host": NAME}, transport=transport, timeout=20)


@pytest.mark.parametrize("name", PROXIES)
def test_each_visitor_has_limits_of_their_own(proxy: Callable[[str], int], name: str) -> None:
    """Whatever X-Forwarded-For they send."""
    port, guesser = proxy(name), f"127.0.1.{PROXIES.index(name) + 1}"

    def guess(one: httpx.Client, number: int) -> int:
        forged = {"X-Forwarded-For": f"192.0.2.{number}", "Forwarded": f"for=192.0.2.{number}"}
        return one.get("/jobs", headers={"Authorization": f"Bearer {name} {number}", **forged}).status_code

    with visitor(port, guesser) as one, visitor(port, f"{guesser}7") as other:
        assert [guess(one, number) for number in range(90)] == [401] * GUESSES + [429] * (90 - GUESSES)
        signed_in = other.post("/ui/sign-in", data={"token": TOKEN})
        assert (signed_in.status_code, one.get("/ui/sign-in").status_code) == (303, 200)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_says_that_it_speaks_https(proxy: Callable[[str], int], name: str) -> None:
    with visitor(proxy(name)) as one:
        assert "Secure" in one.post("/ui/sign-in", data={"token": TOKEN}).headers["set-cookie"].split("; ")


@pytest.mark.parametrize("name", PROXIES)
def test_a_stream_comes_through_at_once(proxy: Callable[[str], int], name: str) -> None:
    with visitor(proxy(name)) as one:
        one.headers["Authorization"] = f"Bearer {TOKEN}"
        job = one.post("/jobs", json={"spec": TINY}).json()["id"]
        with one.stream("GET", f"/jobs/{job}/events", headers=STREAM) as response:
            assert next(parse_stream(response.iter_lines()))[1:] == ("state", {"state": "queued"})


def test_single_sign_on(proxy: Callable[[str], int]) -> None:
    port = proxy("single-sign-on")
    with visitor(port) as one:
        client = Flopwatch(f"https://127.0.0.1:{port}")
        client.close()
        client._http = one
        with pytest.raises(Refused, match=r"403 Forbidden\.\n.* sign-on before it"):
            client.list_jobs()
        began = time.monotonic()
        answer = one.post("/jobs", json={"spec": TINY}, headers={"Cookie": "person=ada"})
        assert (answer.status_code, answer.json()["submitted_by"]) == (201, "ada")
        assert time.monotonic() - began < 10, "the body stays here: the sign-on would wait for it"
        forged = {"Cookie": "person=ada", "Flopwatch-User": "eve", "Authorization": "Bearer x"}
        assert one.post("/jobs", json={"spec": TINY}, headers=forged).json()["submitted_by"] == "ada"
