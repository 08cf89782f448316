"""Services whose servers and workers are forked, not exec'd: each is ready seconds of processor time sooner.

One forkserver (tests/plugins/forkserver.py) serves all tests of a pytest process, or of all of `--processes`.
tests/app/cli/test_processes.py, tests/tools/test_demo.py and `python -m tests.chaos` start the real commands.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.service import Service

PROJECT = Path(__file__).resolve().parents[1]
PLUGINS = PROJECT / "tests" / "plugins"
ROOM = 1000
"""Bytes for the longest command line of a fork."""

SHARED = "TESTS_FORKSERVER"
"""The variable with the address of the forkserver that several pytest processes share."""


def run_forkserver(listens: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process that forks; it reads orders from this socket, or accepts connections at it."""
    path = [PLUGINS / "plain_kind", PROJECT, PLUGINS, *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = ("FLOPWATCH_", "SABOTAGE", "MOVED_CLOCK", "TRITON_INTERPRET")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return subprocess.Popen(
        [sys.executable, "-m", "forkserver", str(listens.fileno()), " " * ROOM],
        # Threads of OpenBLAS or OpenMP would not survive a fork.
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        pass_fds=[listens.fileno()],
    )


def share_forkserver() -> None:
    """Start a forkserver for this process and its children; it ends with this process."""
    address = f"flopwatch-tests-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        run_forkserver(listener).returncode = 0  # nobody waits for it
    os.environ[SHARED] = address


class Forkserver:
    """A connection to the process that forks, with the children that it has started."""

    def __init__(self) -> None:
        if (address := os.environ.get(SHARED)) is not None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(f"\0{address}")
        else:
            self._socket, theirs = socket.socketpair()
            with theirs:
                run_forkserver(theirs).returncode = 0  # nobody waits for it
        atexit.register(self._socket.close)
        self._received = b""
        self._guard = threading.Lock()
        self._started: list[Forked] = []
        self._running: dict[int, Forked] = {}
        """By pid. The kernel gives the pid of a child that has ended to another one, sooner or later."""

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        before: str = "",
    ) -> Forked:
        """Fork `python ARGUMENTS` (-m MODULE …, or -c CODE), which runs the statements `before` first.

        What it prints is appended to the file `output`, errors to a file of their own if one is given.
        """
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors or output),
            "before": before,
        }
        with self._guard:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            while not self._started:
                self._receive(None)
            started = self._started.pop()
        started.args = list(arguments)
        return started

    @property
    def has_ended(self) -> bool:
        """Whether it forks no more."""
        poller = select.poll()
        poller.register(self._socket, 0)  # a hang-up is always reported
        return bool(poller.poll(0))

    def wait_for_end(self, child: Forked, timeout_s: float | None) -> None:
        """Wait at most so long for the end of a child, and set its return code."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._guard:
            while child.returncode is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._receive(left):
                    return

    def _receive(self, timeout_s: float | None) -> bool:
        """Handle the next messages of the forkserver; return False if none comes in this time."""
        self._socket.settimeout(timeout_s)
        try:
            chunk = self._socket.recv(65_536)
        except (BlockingIOError, TimeoutError):
            return False
        finally:
            self._socket.settimeout(None)
        if not chunk:
            raise RuntimeError("the forkserver has ended")
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            pid = message["pid"]
            if "returncode" in message:
                self._running.pop(pid).returncode = message["returncode"]
            else:
                self._running[pid] = Forked(self, pid)
                self._started.append(self._running[pid])
        return True


class Forked(subprocess.Popen[bytes]):
    """A child of the forkserver, to be used as if it were one of this process."""

    def __init__(self, forkserver: Forkserver, pid: int) -> None:
        self._child_created = False  # Popen's own destructor would wait for it
        self._forkserver = forkserver
        self.pid = pid
        self.stdin = self.stdout = self.stderr = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._forkserver.wait_for_end(self, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._forkserver.wait_for_end(self, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


_forkservers: list[Forkserver] = []


def forkserver() -> Forkserver:
    """The one of this process, which ends with this process; another one if a test's fault has ended that."""
    if not _forkservers or _forkservers[-1].has_ended:
        _forkservers.append(Forkserver())
    return _forkservers[-1]


class ForkedService(Service):
    """A service whose processes the forkserver forks."""

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        return forkserver().start(["-m", *arguments], environment, log)
