"""The server process: uvicorn with one application. It prints where it listens, and ends its streams when told to
stop."""

import asyncio
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path
from socket import socket
from types import FrameType

import uvicorn

from app import logs
from app.main import create_app
from app.server import connections
from app.server.access import lock_folder
from app.settings import Settings
from app.store.queue import ends
from flopwatch import address

logger = logging.getLogger(__name__)

# Time that requests in flight get when the server is told to stop; streams end at once.
SHUTDOWN_S = 10
# Number of clients that may wait in the kernel to be accepted.
BACKLOG = 2048
# Largest number of connections that asyncio accepts before it calls `Connection.connection_made`.
ACCEPTED_AT_ONCE = 64
# Net allocations between garbage collections. A table has tens of thousands of objects, none of them in cycles: with
# Python's default of 700, scanning them again and again takes a third of a table's time.
COLLECTS_AFTER = (50_000, 10, 10)
SWITCH_S = 0.001
"""How long a thread that computes keeps the others waiting. A submission waits so after each of its statements: with
Python's default of 5 ms, a few people who looked at pages made it take a second."""


def reachable(url: str) -> str:
    """Return the address by which clients on this host reach a server that listens at `url`, which may mean all
    addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def trusted_proxies(settings: Settings) -> list[str] | None:
    """Return the proxies whose headers are believed; None for uvicorn's own setting and default."""
    return None if settings.trusted_proxies is None else list(map(str, settings.trusted_proxies))


class Server(uvicorn.Server):
    """uvicorn's server, which prints "listening on http://… (pages: …)" once it listens."""

    def __init__(self, config: uvicorn.Config, data_dir: Path) -> None:
        super().__init__(config)
        self._data_dir = data_dir

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for listener in server.sockets:
                with socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(BACKLOG)  # asyncio accepts as many connections at once as this queue holds
                host, port = listener.getsockname()[:2]
                self._tell(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        address.remove(self._data_dir)
        await super().shutdown(sockets)

    def _tell(self, url: str) -> None:
        """Announce where the server listens: to later commands, in the data folder, and on standard output."""
        try:
            address.leave(self._data_dir, reachable(url))
        except OSError as error:
            logger.warning("cannot leave the server's address in %s: %s", self._data_dir, error.strerror)
        logs.announce(f"listening on {url} (pages: {reachable(url)}/ui)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        services = getattr(self.config.app.state, "services", None)  # type: ignore[union-attr]
        if services is not None:
            self._loop.call_soon_threadsafe(services.changes.stop)
            self._loop.call_soon_threadsafe(services.slices.stop)
        super().handle_exit(sig, frame)


def listen(settings: Settings) -> int:
    """Serve until told to stop; returns the process's exit code.

    Raises CannotRunHere while another server uses the data folder.
    """
    lock = lock_folder(settings)
    # The ends of jobs, and warnings and worse of everything in this process, uvicorn and asyncio included.
    logs.set_up("WARNING", settings.log_format)
    ends.logger.setLevel(logging.INFO)
    limit = connections.connections_within_files(settings.max_connections)
    incoming = connections.Incoming(limit, settings.request_timeout_s)
    config = uvicorn.Config(
        create_app(settings),
        http=partial(connections.Connection, incoming=incoming),  # type: ignore[arg-type]  # called, never subclassed
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        forwarded_allow_ips=trusted_proxies(settings),
    )
    server = Server(config, settings.data_dir)
    gc.set_threshold(*COLLECTS_AFTER)
    sys.setswitchinterval(SWITCH_S)
    server.run()
    if lock is not None:
        os.close(lock)
    return 0 if server.started else 1
