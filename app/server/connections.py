"""Limits connections, so that idle and slow clients cannot take the server away from the others.

uvicorn waits for a request as long as its client likes, and accepts connections until the process has no file
descriptor left, not even for the database. Here a request has to arrive within a time limit, and there are fewer
connections than descriptors. When there are too many connections, the server closes the one whose request has been
incomplete for longest. That never affects a client that sends its whole request at once, as honest clients do.
Addresses play no part, since behind a proxy all clients have the same address.

A client that sends requests and never reads the answers would also keep its connection. While the server answers, it
checks now and then whether the client reads what was sent, and closes the connection if the client has read nothing for
as long as a request may take. When there are too many connections, the one whose client has read nothing for longest is
closed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import struct
import termios
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
"""Largest number of connections that asyncio accepts before we see them; for a moment there may be this many too
many."""
RESERVED_FILES = 256
"""File descriptors kept free: for those connections, as many that are being closed, the database and downloads."""
MIN_CONNECTIONS = 16
UNLIMITED_FILES = 1 << 16
UNREAD_S = 3.0
"""If a client has read nothing of what was sent for this many seconds, its connection is closed first when there are
too many."""
LOOKS = 10
"""Number of checks of a reader within the time that a request may take."""
INT = struct.Struct("i")
BYTES_ACKED = struct.Struct("120xQ")
"""The field tcpi_bytes_acked of Linux's struct tcp_info."""

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
    """Return how many connections a server with this limit of open files may have."""
    return max(MIN_CONNECTIONS, min(wanted, files - RESERVED_FILES))


@dataclass
class Answer:
    """The progress of a client in reading an answer."""

    taken: int
    """Number of bytes that it has read since it connected."""
    since: float
    """The event loop's time at which it last had read everything, or something more."""
    timer: asyncio.TimerHandle


class Incoming:
    """The open connections of one server: those with an incomplete request, the oldest first, and those that are being
    answered, with the client that has read nothing for longest first.
    """

    def __init__(self, limit: int, request_timeout_s: float) -> None:
        self.limit = limit
        self.request_timeout_s = request_timeout_s
        self.open: set[Connection] = set()
        self.incomplete: dict[Connection, asyncio.TimerHandle] = {}
        self.answered: dict[Connection, Answer] = {}

    def make_room(self) -> None:
        """Close connections until their number is within the limit."""
        while len(self.open) > self.limit:
            if self._end_unread():
                continue
            log.warning("%d connections are open: one was ended whose request had not arrived", self.limit)
            oldest = next(iter(self.incomplete))
            if len(self.incomplete) == 1:  # the newest one: all others are being answered
                oldest.end(TOO_MANY)
            else:
                oldest.end()

    def _end_unread(self) -> bool:
        """Close the connection whose client has read nothing for longest; returns False if none is older than
        UNREAD_S."""
        while self.answered:
            connection, answer = next(iter(self.answered.items()))
            if connection.loop.time() - answer.since < UNREAD_S:
                return False
            if not connection.is_read():  # otherwise it is now the last in the order
                log.warning("%d connections are open: one was ended whose client does not read", self.limit)
                connection.end()
                return True
        return False


class Connection(H11Protocol):
    """uvicorn's connection, registered with an `Incoming` for its whole life."""

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
        # A refusal may already be on its way when the rest of the request turns out not to be HTTP; only one answer can
        # be sent.
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
            if not self.transport.get_write_buffer_size():
                return
        self.transport.abort()

    def is_read(self) -> bool:
        """Return True if the client has read everything that was sent, or more than at the last check, and record
        it."""
        answer, taken = self._incoming.answered[self], self._taken()
        if self._unsent() and taken == answer.taken:
            return False
        del self._incoming.answered[self]  # to the end of the row
        self._incoming.answered[self] = Answer(taken, self.loop.time(), answer.timer)
        return True

    def _look(self) -> None:
        """Record whether the connection waits for the rest of a request, or has received all of it and is being
        answered."""
        incoming = self._incoming
        if self not in incoming.open:  # it has been closed
            return
        # A closing transport still sends its buffer, which may take for ever.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            if answer := incoming.answered.pop(self, None):
                answer.timer.cancel()
            if self not in incoming.incomplete:
                incoming.incomplete[self] = self.loop.call_later(incoming.request_timeout_s, self._end_incomplete)
            return
        if timer := incoming.incomplete.pop(self, None):
            timer.cancel()
        if self not in incoming.answered:
            incoming.answered[self] = Answer(self._taken(), self.loop.time(), self._look_later())

    def _look_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self._incoming.request_timeout_s / LOOKS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """Close the connection if its client has read nothing for as long as a request may take."""
        incoming = self._incoming
        if not self.is_read() and self.loop.time() - incoming.answered[self].since >= incoming.request_timeout_s:
            self.end()
        else:
            incoming.answered[self].timer = self._look_later()

    def _end_incomplete(self) -> None:
        if self.transport.get_write_buffer_size():  # the previous answer is still on its way
            self.transport.close()
            self._look()
        else:
            self.end(TIMED_OUT)

    def _unsent(self) -> int:
        """Return the number of bytes that wait in this process and in the kernel for the client."""
        found = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):  # it has just been closed
            kernel = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(INT.size))
            found += INT.unpack(kernel)[0]
        return found

    def _taken(self) -> int:
        """Return the number of bytes that the client has read since it connected."""
        with contextlib.suppress(OSError):
            found = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.size)
            return int(BYTES_ACKED.unpack(found)[0])
        return 0

    @property
    def _socket(self) -> socket.socket:
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    def _forget(self) -> None:
        self._incoming.open.discard(self)
        if timer := self._incoming.incomplete.pop(self, None):
            timer.cancel()
        if answer := self._incoming.answered.pop(self, None):
            answer.timer.cancel()
