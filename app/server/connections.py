"""Limits connections and the time of requests, so that idle and slow clients cannot take the server from the others.

uvicorn waits for a request as long as its client likes, and accepts connections until no file descriptor is left, not
even for the database. Here a request has to arrive within a time limit. When there are too many connections, the server
closes the one whose request has been incomplete for longest. Addresses play no part, since behind a proxy all clients
have the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

RESERVED_FILES = 256
"""File descriptors that are left to the database, to downloads, and to connections that are just accepted or closed."""
MIN_CONNECTIONS = 16


def _answer(status: int, title: str, detail: str, *more: str) -> bytes:
    body = json.dumps({"type": "about:blank", "title": title, "status": status, "detail": detail})
    headers = (f"Content-Length: {len(body)}", "Content-Type: application/problem+json", *more, "Connection: close")
    return "\r\n".join((f"HTTP/1.1 {status} {title}", *headers, "", body)).encode()


TIMED_OUT = _answer(408, "Request Timeout", "It took longer to arrive than the server's FLOPWATCH_REQUEST_TIMEOUT_S.")
TOO_MANY = _answer(503, "Service Unavailable", "FLOPWATCH_MAX_CONNECTIONS are open: try again.", "Retry-After: 5")


def connections_within_files(wanted: int) -> int:
    """Raise this process's limit of open files, and return how many connections it may have, at most `wanted`."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        files = most
    return wanted if files == resource.RLIM_INFINITY else max(MIN_CONNECTIONS, min(wanted, files - RESERVED_FILES))


@dataclass
class Incoming:
    """The open connections of one server, and the timers of those whose request is incomplete, the oldest first."""

    limit: int
    request_timeout_s: float
    open: set[Connection] = field(default_factory=set)
    incomplete: dict[Connection, asyncio.TimerHandle] = field(default_factory=dict)


class Connection(H11Protocol):
    """uvicorn's connection, which registers itself with an `Incoming`."""

    def __init__(self, *arguments: Any, incoming: Incoming, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._incoming = incoming

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._incoming.open.add(self)
        self._check()
        if len(self._incoming.open) > self._incoming.limit:
            log.warning("%d connections are open: the server closes one for each new one", self._incoming.limit)
            oldest = next(iter(self._incoming.incomplete), self)
            oldest.end(TOO_MANY if oldest is self else None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.open.discard(self)
        self._check()
        super().connection_lost(exc)

    def end(self, answer: bytes | None) -> None:
        """Close the connection after this answer, or without one at once."""
        if answer is None:
            self.transport.abort()
        else:
            self.transport.write(answer)
            self.transport.close()
        self._check()

    def _check(self) -> None:
        """Start the time limit if the connection waits for the rest of a request; otherwise stop it."""
        timers = self._incoming.incomplete
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            if timer := timers.pop(self, None):
                timer.cancel()
        elif self not in timers:
            timers[self] = self.loop.call_later(self._incoming.request_timeout_s, self.end, TIMED_OUT)
