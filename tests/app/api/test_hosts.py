"""The hosts that a request may name; a page whose name points at the server (DNS rebinding) can do nothing."""

import threading
from typing import Any

import httpx
import pytest

from app.api.hosts import AllowedHosts
from app.errors import MisdirectedRequest
from app.settings import Settings
from tests.app.conftest import TINY

REBOUND = "evil.example"


def rebind(site: Any) -> list[str]:
    """What a page of evil.example gets done after its name was pointed at the server."""
    port = site.url.rpartition(":")[2]
    origin = f"{REBOUND}:{port}"
    headers = {"Host": origin, "Origin": f"http://{origin}", "Sec-Fetch-Site": "same-origin"}
    before, done = site.rows(), []
    for method, path in [("POST", "/jobs"), ("GET", "/jobs"), ("GET", "/ui"), ("GET", "/readyz"), ("GET", "/nothing")]:
        answer = site.http.request(method, path, headers=headers, json={"spec": TINY} if method == "POST" else None)
        is_refused = (answer.status_code, answer.headers["content-type"]) == (421, "application/problem+json")
        words = ('"misdirected_request"', REBOUND, "FLOPWATCH_ALLOWED_HOSTS")
        if not is_refused or not all(word in answer.text for word in words):
            done.append(f"{method} {path}: {answer.status_code} {answer.text}")
    if site.rows() != before:
        done.append("something was stored")
    return done


def test_a_rebound_name_can_do_nothing(site: Any) -> None:
    assert rebind(site) == []


def test_control_of_the_hosts(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllowedHosts, "check", lambda *_: None)
    assert any(line.startswith("POST /jobs: 201") for line in rebind(site))


def test_the_host_comes_before_the_token(serve: Any, tmp_path: Any) -> None:
    with serve(tmp_path, api_token="secret") as site:
        answer = site.http.get("/jobs", headers={"Host": REBOUND})
        assert answer.status_code == 421
        assert "www-authenticate" not in answer.headers


def allowed(hosts: AllowedHosts, host: str | None, arrived_at: str | None = "127.0.0.1") -> bool:
    try:
        hosts.check(host, arrived_at)
    except MisdirectedRequest:
        return False
    return True


LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "x.localhost:1", "127.0.0.1", "127.8.9.1:8000", "[::1]:8000"]
OTHERS = [
    None, "", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
    "evil.example@localhost", "localhost@evil.example", "[::1", "::1]", "127.0.0.1:80:80", "localhost:x", "a b", "é",
    "10.0.0.7", "[fe80::1]", "localhost/", "localhost, evil.example", ".", "*", "*.localhost.evil.example",
]  # fmt: skip


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::", ""])
def test_loopback_is_always_allowed_and_other_names_never(bound: str) -> None:
    hosts = AllowedHosts(bound)
    assert [host for host in LOOPBACK if not allowed(hosts, host)] == []
    assert [host for host in OTHERS if allowed(hosts, host)] == []


def test_the_bound_host() -> None:
    assert allowed(AllowedHosts("gpu-box"), "GPU-Box:8000")
    assert allowed(AllowedHosts("10.0.0.7"), "10.0.0.7:8000", "10.0.0.7")
    assert not allowed(AllowedHosts("10.0.0.7"), "10.0.0.8:8000", "10.0.0.7")
    assert allowed(AllowedHosts("fe80::7"), "[FE80:0::7]:8000", "fe80::7")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_the_connections_own_address_is_allowed(bound: str) -> None:
    hosts = AllowedHosts(bound)
    assert allowed(hosts, "10.0.0.7:8000", "10.0.0.7")
    assert allowed(hosts, "10.0.0.7:8000", "::ffff:10.0.0.7")
    assert not allowed(hosts, "10.0.0.8:8000", "10.0.0.7")
    assert not allowed(AllowedHosts("127.0.0.1"), "10.0.0.7:8000", "10.0.0.7")


def test_added_hosts() -> None:
    hosts = AllowedHosts("127.0.0.1", ("GPU-Box.", "*.lab.example", "fe80::1"))
    for host in ("gpu-box:8000", "a.lab.example", "b.a.lab.example:1", "[fe80::1]"):
        assert allowed(hosts, host), host
    for host in ("lab.example", "evil-lab.example", "gpu-box.evil.example"):
        assert not allowed(hosts, host), host
    assert allowed(AllowedHosts("127.0.0.1", ("*",)), "evil.example")


def test_hosts_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().allowed_hosts == ()
    monkeypatch.setenv("FLOPWATCH_ALLOWED_HOSTS", "gpu-box, *.lab.example,")
    assert Settings.from_environment().allowed_hosts == ("gpu-box", "*.lab.example")


def test_behind_a_reverse_proxy(serve: Any, tmp_path: Any) -> None:
    """A proxy that does what docs/reverse-proxy.md asks for: addresses are those that the browser knows."""
    reason = "pip install -e .[dev]"
    proxies = pytest.importorskip("werkzeug.middleware.http_proxy", reason=reason)
    serving = pytest.importorskip("werkzeug.serving", reason=reason)
    sent = {"Host": "flopwatch.example.org", "Origin": "https://flopwatch.example.org"}
    with serve(tmp_path, allowed_hosts=(sent["Host"],)) as site:
        target = {"target": f"{site.url}/", "host": None, "headers": {"X-Forwarded-Proto": "https"}}
        server = serving.make_server("127.0.0.1", 0, proxies.ProxyMiddleware(None, {"/ui": target}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=sent, trust_env=False) as browser:
                answer = browser.post("/ui/new", data={"kind": "benchmark"})
                assert (answer.status_code, answer.headers["location"]) == (303, "/ui/jobs/1")
                page = browser.get("/ui/jobs/1").text
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
    assert "https://flopwatch.example.org/jobs" in page, "the command of curl"
    assert "http://" not in page


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "gpu-box", ""])
def test_probes_need_no_host(site: Any, host: str) -> None:
    answer = site.http.get("/healthz", headers={"Host": host})
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
