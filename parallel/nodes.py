"""How the nodes of one launch reach each other, by TCP.

Node 0 launches. It listens at an address that the other nodes know, at the first of a few ports that is free there.
Connections prove that they have the launch's key. Each other node keeps one connection, over which it gets the
launch's request and sends its ranks' logs; when the connection ends, it ends its ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915
HANDSHAKE_S = 5.0
"""Seconds in which a connection must prove its key: others may connect by mistake."""
RETRY_S = 0.2
LOG_S = 5.0
"""Seconds in which a node must send a log."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch."""

    count: int
    address: str
    """Node 0's IPv4 address, as the others reach it."""
    ports: Sequence[int]
    """The ports at which node 0 may listen."""
    key: str
    """A secret of these nodes, in hexadecimal digits."""

    @property
    def authkey(self) -> bytes:
        return bytes.fromhex(self.key)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Nodes:
        return cls(**json.loads(text))

    @contextmanager
    def listener(self, backlog: int) -> Iterator[Listener]:
        """Listen at node 0. Raises OSError if none of the ports is free."""
        for port in self.ports:
            try:
                listener = Listener((self.address, port), family="AF_INET", backlog=backlog, authkey=self.authkey)
            except OSError as error:
                failure = error
                continue
            with listener:
                _limit(listener._listener._socket.fileno(), HANDSHAKE_S)  # type: ignore[attr-defined]
                yield listener
            return
        raise OSError(failure.errno, f"{failure.strerror} at {self.address}, ports {', '.join(map(str, self.ports))}")

    def reach(self) -> Connection:
        """Connect to node 0 as soon as it listens; waits for ever."""
        while True:
            for port in self.ports:
                with suppress(AuthenticationError, EOFError, OSError):
                    return self._try(port)
            time.sleep(RETRY_S)

    def _try(self, port: int) -> Connection:
        """Connect to one port, at which somebody else may listen."""
        with socket.create_connection((self.address, port), timeout=HANDSHAKE_S) as opened:
            opened.settimeout(None)
            _limit(opened.fileno(), HANDSHAKE_S)
            connection = Connection(opened.detach())
        try:
            answer_challenge(connection, self.authkey)
            deliver_challenge(connection, self.authkey)
        except BaseException:
            connection.close()
            raise
        return accepted(connection)

    def free_port(self) -> int:
        """Return a port of node 0 that is free now."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])


class RemoteNode:
    """Another node, as node 0 sees it."""

    def __init__(self, connection: Connection, facts: Any) -> None:
        self._connection = connection
        self.facts = facts
        """What the node told about itself."""

    def start(self, request: str) -> None:
        self._connection.send_bytes(request.encode())

    def failure(self) -> str | None:
        """Return why the node could not start its ranks, or is gone; None if it has not said so."""
        try:
            return str(json.loads(self._connection.recv_bytes())) if self._connection.poll() else None
        except (EOFError, OSError):
            return "has gone"

    def copy_log(self, rank: int, file: Path) -> None:
        """Copy the end of the log of one of the node's ranks to a file here, if the node still answers."""
        try:
            self._connection.send_bytes(str(rank).encode())
            if self._connection.poll(LOG_S):
                file.write_bytes(self._connection.recv_bytes())
        except (EOFError, OSError):
            return

    def close(self) -> None:
        """Let the node end its ranks."""
        self._connection.close()


def accepted(connection: Connection) -> Connection:
    """Return a connection that has proved its key: from now on it may be silent."""
    _limit(connection.fileno(), 0.0)
    return connection


def interface_to(address: str) -> str | None:
    """Return the name of the network interface by which this host reaches another one; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


def _limit(descriptor: int, seconds: float) -> None:
    """Limit how long a read from a socket waits; accepted sockets inherit it. 0: no limit."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int(1e6 * (seconds - whole)))
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
