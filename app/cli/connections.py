"""Limits connections, so that idle and slow clients cannot take the server away from the others.

uvicorn waits for a request as long as its client likes, and accepts connections until the process has no file left,
the database's included. Here a request has a time to arrive in, and there are fewer connections than files. When one
too many comes, the server ends the connection whose request has been incomplete for longest. A client that sends its
whole request at once, as honest clients do, is not that one. Addresses play no part: behind a proxy all clients have
the same.

A client that asks and never reads the answers would keep its connection too. While the server answers, it looks now
and then if the client takes what was sent, and ends the connection if it took nothing for as long as a request may
take. When one connection too many comes, the one whose client has taken nothing for longest goes before all others.
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
"""Most connections that asyncio accepts before we look at them; for a moment there may be this many too many."""
RESERVED_FILES = 256
"""Files kept free: for those connections, as many that are being closed, the database and downloads."""
MIN_CONNECTIONS = 16
UNLIMITED_FILES = 1 << 16
UNREAD_S = 3.0
"""A connection whose client has left for so long what was sent goes first when there is one too many."""
LOOKS = 10
"""How often the server looks at a reader within the time that a request may take."""
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
    """Return how many connections a server may have that may open this many files."""
    return max(MIN_CONNECTIONS, min(wanted, files - RESERVED_FILES))


@dataclass
class Answer:
    """What the client has taken of what was sent."""

    taken: int
    """Bytes, since it connected."""
    since: float
    """When it last had taken everything, or something more: the event loop's time."""
    timer: asyncio.TimerHandle


class Incoming:
    """The open connections of one server: those whose request is incomplete, the oldest first, and those that are being
    answered, first those whose client has taken nothing for longest.
    """

    def __init__(self, limit: int, request_timeout_s: float) -> None:
        self.limit = limit
        self.request_timeout_s = request_timeout_s
        self.open: set[Connection] = set()
        self.incomplete: dict[Connection, asyncio.TimerHandle] = {}
        self.answered: dict[Connection, Answer] = {}

    def make_room(self) -> None:
        """End connections until their number is within the limit."""
        while len(self.open) > self.limit:
            if self._end_unread():
                continue
            log.warning("%d connections are open: one was ended whose request had not arrived", self.limit)
            oldest = next(iter(self.incomplete))
            if len(self.incomplete) == 1:  # the one that has just come: all others are being answered
                oldest.end(TOO_MANY)
            else:
                oldest.end()

    def _end_unread(self) -> bool:
        """End the connection whose client has taken nothing for longest; False if none has for UNREAD_S."""
        while self.answered:
            connection, answer = next(iter(self.answered.items()))
            if connection.loop.time() - answer.since < UNREAD_S:
                return False
            if not connection.is_read():  # else it is the last in the row now
                log.warning("%d connections are open: one was ended whose client does not read", self.limit)
                connection.end()
                return True
        return False


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
            if not self.transport.get_write_buffer_size():
                return
        self.transport.abort()

    def is_read(self) -> bool:
        """Note if the client has taken all that was sent, or some more than it had when it last did."""
        answer, taken = self._incoming.answered[self], self._taken()
        if self._unsent() and taken == answer.taken:
            return False
        del self._incoming.answered[self]  # to the end of the row
        self._incoming.answered[self] = Answer(taken, self.loop.time(), answer.timer)
        return True

    def _look(self) -> None:
        """Note if the connection waits for the rest of a request, or has received it whole and is being answered."""
        incoming = self._incoming
        if self not in incoming.open:  # it has been ended
            return
        # A transport that is closing still sends what it has, which may take for ever.
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
        """End the connection if its client has taken nothing for as long as a request may take."""
        incoming = self._incoming
        if not self.is_read() and self.loop.time() - incoming.answered[self].since >= incoming.request_timeout_s:
            self.end()
        else:
            incoming.answered[self].timer = self._look_later()

    def _end_incomplete(self) -> None:
        if self.transport.get_write_buffer_size():  # the answer before is still on its way
            self.transport.close()
            self._look()
        else:
            self.end(TIMED_OUT)

    def _unsent(self) -> int:
        """Return the bytes that wait in this process and in the kernel for the client to take them."""
        found = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):  # it has just been closed
            kernel = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(INT.size))
            found += INT.unpack(kernel)[0]
        return found

    def _taken(self) -> int:
        """Return the bytes that the client has taken since it connected."""
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
