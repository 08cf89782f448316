"""The command line's side of the HTTP API: problems become CliError, streams are resumed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx

from app.errors import InvalidEnvironment
from app.settings import Settings

TIMEOUT_S = httpx.Timeout(30.0, read=120.0)
# Must exceed the time between two of the server's keep-alive comments.
STREAM_TIMEOUT_S = httpx.Timeout(30.0, read=60.0)
RECONNECT_S = 1.0
MAX_RECONNECTS = 30


class CliError(Exception):
    """Something to tell the user on stderr, followed by exit code 1."""


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    type: str
    data: dict[str, Any]


def server_url(settings: Settings) -> str:
    """Return FLOPWATCH_URL, or the address at which `flopwatch serve` listens with these settings."""
    if url := os.environ.get("FLOPWATCH_URL"):
        return url.rstrip("/")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


class Client:
    """A connection to one server."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {token}"} if token else {}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @classmethod
    def from_environment(cls) -> Self:
        try:
            settings = Settings.from_environment()
        except InvalidEnvironment as error:
            raise CliError(error.detail) from error
        return cls(server_url(settings), settings.api_token.get_secret_value() if settings.api_token else None)

    def get(self, path: str, **params: Any) -> Any:
        """Get a route's JSON; parameters that are None are left out."""
        return self.send("GET", path, params=params).json()

    def text(self, path: str, **params: Any) -> str:
        return self.send("GET", path, params=params).text

    def send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send one request; raises CliError with the server's words if it refuses. `timeout_s`: longest silence."""
        timeout = TIMEOUT_S if timeout_s is None else httpx.Timeout(30.0, read=timeout_s)
        chosen = {name: value for name, value in (params or {}).items() if value is not None}
        with self._explained():
            response = self._http.request(method, path, params=chosen, json=body, headers=headers, timeout=timeout)
        return checked(response)

    @contextlib.contextmanager
    def download(self, path: str) -> Iterator[httpx.Response]:
        """A response whose body is still to be read."""
        with self._explained(), self._http.stream("GET", path) as response:
            if response.is_error:
                response.read()
            yield checked(response)

    def pages(self, path: str, limit: int, **params: Any) -> list[Any]:
        """Up to `limit` entries of a list, over as many pages as it takes."""
        found: list[Any] = []
        after = None
        while len(found) < limit:
            page = self.get(path, limit=min(limit - len(found), 500), after=after, **params)
            found += page["data"]
            after = page["next"]
            if after is None:
                break
        return found

    def events(self, job_id: int) -> Iterator[Event]:
        """Yield a job's events from the first on, until it is done; after a lost connection, resume where it broke."""
        last_id, failures = "0", 0
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": last_id}
            try:
                with self._http.stream(
                    "GET", f"/jobs/{job_id}/events", headers=headers, timeout=STREAM_TIMEOUT_S
                ) as response:
                    if response.is_error:
                        response.read()
                    if checked(response).status_code == httpx.codes.NO_CONTENT:
                        return
                    for event_id, event in parse_stream(response.iter_lines()):
                        last_id, failures = event_id, 0
                        yield event
                        if event.type == "done":
                            return
            except httpx.TransportError as error:
                failures += 1
                if failures > MAX_RECONNECTS:
                    raise CliError(f"Lost {self.url}: {error}.") from error
                time.sleep(RECONNECT_S)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise CliError(
                f"Cannot talk to {self.url}: {error}. Start the server with `flopwatch up`, or set FLOPWATCH_URL."
            ) from error


def parse_stream(lines: Iterator[str]) -> Iterator[tuple[str, Event]]:
    """(id, event) pairs of a stream of server-sent events."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", "0"), Event(fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}


def checked(response: httpx.Response) -> httpx.Response:
    """Return the response; raises CliError if it is a problem."""
    if not response.is_error:
        return response
    if not response.headers.get("content-type", "").endswith("json"):
        raise CliError(f"{response.url} answered {response.status_code} {response.reason_phrase}.")
    raise CliError(problem_text(response.json()))


def problem_text(problem: dict[str, Any]) -> str:
    """Write a problem (RFC 9457) for people: its title, then each field with its cure."""
    lines = [problem.get("title", "Error")]
    fields = [f"  {error['pointer'] or 'body'}: {error['detail']}" for error in problem.get("errors", ())]
    return "\n".join(lines + (fields or [f"  {problem.get('detail', '')}"]))
