"""Limits connections, so that idle and slow clients cannot take the server away from the others.

uvicorn waits for a request as long as its client likes, and accepts connections until the process has no file left,
the database's included. Here a request has a time to arrive in, and there are fewer connections than files. When one
too many comes, the server ends the connection whose request has been incomplete for longest. A client that sends its
whole request at once, as honest clients do, is not that one. Addresses play no part: behind a proxy all clients have
the same.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
"""Most connections that asyncio accepts before we look at them; for a moment there may be this many too many."""
RESERVED_FILES = 256
"""Files kept free: for those connections, as many that are being closed, the database and downloads."""
MIN_CONNECTIONS = 16
UNLIMITED_FILES = 1 << 16

_CLOSED = b"Content-Length: 0\r\nConnection: close\r\n\r\n"
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSED
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\n" + _CLOSED


def raise_file_limit() -> int:
    """Raise this process's limit of open files to its hard limit; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED_FILES if hard == resource.RLIM_INFINITY else hard
    if soft not in (wanted, resource.RLIM_INFINITY):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("cannot raise the limit of open files from %d to %d: %s", soft, wanted, error)
            return soft
    return wanted


def connections_within(files: int, wanted: int) -> int:
    """Return how many connections a server may have that may open this many files."""
    return max(MIN_CONNECTIONS, min(wanted, files - RESERVED_FILES))


class Incoming:
    """The open connections of one server, and those whose request is incomplete, the oldest first."""

    def __init__(self, limit: int, request_timeout_s: float) -> None:
        self.limit = limit
        self.request_timeout_s = request_timeout_s
        self.open: set[Connection] = set()
        self.incomplete: dict[Connection, asyncio.TimerHandle] = {}

    def make_room(self) -> None:
        """End connections until their number is within the limit."""
        while len(self.open) > self.limit:
            log.warning("%d connections are open: one was ended whose request had not arrived", self.limit)
            oldest = next(iter(self.incomplete))
            if len(self.incomplete) == 1:  # the one that has just come: all others are being answered
                oldest.end(TOO_MANY)
            else:
                oldest.end()


class Connection(H11Protocol):
    """uvicorn's connection, which an `Incoming` knows from its beginning to its end."""

    def __init__(self, *arguments: Any, incoming: Incoming, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._incoming = incoming

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._incoming.open.add(self)
        self._look()
        self._incoming.make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # A refusal may be under way while the rest of the request turns out to be no HTTP: one answer only can be sent.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def end(self, answer: bytes = b"") -> None:
        """Close the connection now; send an answer first, unless another answer has begun."""
        self._forget()
        if answer and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()

    def _look(self) -> None:
        """Note if the connection waits for the rest of a request, or has received it whole."""
        incoming = self._incoming
        if self not in incoming.open:  # it has been ended
            return
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self not in incoming.incomplete:
                incoming.incomplete[self] = self.loop.call_later(incoming.request_timeout_s, self.end, TIMED_OUT)
        elif timer := incoming.incomplete.pop(self, None):
            timer.cancel()

    def _forget(self) -> None:
        self._incoming.open.discard(self)
        if timer := self._incoming.incomplete.pop(self, None):
            timer.cancel()
