"""The keeper of one unit: it starts the unit's process, and ends every process that the unit leaves behind.

It is the child subreaper of the unit, so it also finds descendants in sessions of their own. It holds the file
descriptors of the devices' locks, so the devices stay locked until the keeper has ended every descendant and is gone,
even if the agent was killed meanwhile. Its control socket leads to the agent:

    agent → keeper   the request, one JSON line; then TERMINATE or KILL; end of file: the agent is dead, kill
    keeper → agent   the report {"exit_code": int | null, "signal": int | null}, when everything has ended

`python -m workers keeper` keeps a unit in a new interpreter; a fork of the warm parent keeps a forked unit.

A unit in a new interpreter may be started behind a gate, a socket that leads to the agent: after its imports, which
take seconds, the unit sends READY and waits for an answer.

A unit that runs under a command of its own (`wrap`: a profiler) is that command's child, not the keeper's. Such
commands close file descriptors, replace standard input, and make sessions, so the unit gets its request from a file and
writes its messages to a FIFO, both in its scratch folder. The keeper holds the FIFO open for writing until the command
has ended; otherwise the agent would see its end before the unit opens it.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.importing import program
from workers.processes.limits import limit_unit
from workers.processes.linux import adopt_orphans, ask_for_stacks, die_with_parent, kill_all, reap, signal_all

TERMINATE = b"T"
KILL = b"K"
READY = b"R"
NOT_STARTED = 127
"""Exit code that the keeper reports for a command that could not be started, as shells do."""
STACKS_S = 0.2
"""Seconds in which processes write their stacks before they are ended."""


@dataclass(frozen=True)
class Request:
    """A request to a unit's process."""

    kind: str
    spec: dict[str, Any]
    unit: dict[str, Any]
    scratch: str
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables set before the unit's process runs."""
    ceilings: str = ""
    """Folder of the host's measured ceilings."""
    task: Literal["run", "collect", "node", "probe"] = "run"
    """The task: run the unit, read the files that its wrapper has written, run ranks for a unit of another node, or
    probe the GPUs."""
    wrap: list[str] = field(default_factory=list)
    """The command that the unit runs under; empty if there is none."""

    @property
    def file(self) -> Path:
        """The file from which a wrapped unit reads its request."""
        return Path(self.scratch) / ".request.json"

    @property
    def fifo(self) -> Path:
        """The FIFO to which a wrapped unit writes its messages."""
        return Path(self.scratch) / ".messages"

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        return cls(**json.loads(line))


def keep(
    control: socket.socket, messages: int, log: int, start: Callable[[Request], int | None], gate: int | None = None
) -> None:
    """Run one unit to its end; returns when none of its processes is left. Call it in a process made for it. `control`:
    the socket to the agent. `start`: starts the unit, which gets the other descriptors, and returns its pid, or None if
    that is impossible."""
    adopt_orphans()
    wakeup, wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with control, control.makefile("rb", buffering=0) as incoming:
        line = incoming.readline()
        if not line.endswith(b"\n"):
            return
        request = Request.from_line(line)
        pid = start(request)
        # The agent reads both pipes to their ends: only the unit may hold them open.
        for descriptor in (log, *([] if request.wrap else [messages]), *([] if gate is None else [gate])):
            os.close(descriptor)
        if pid is None:
            code = NOT_STARTED
        else:
            status = _wait(control, wakeup, pid)
            kill_all()
            code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        report = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        try:
            control.sendall(json.dumps(report).encode() + b"\n")
        except OSError:
            return  # the agent is gone


def _wait(control: socket.socket, wakeup: int, pid: int) -> int | None:
    """Wait for the unit's process and obey the agent; returns the wait status, None when everything was killed."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    order = _receive(control)
                    if order == TERMINATE:
                        if ask_for_stacks():
                            time.sleep(STACKS_S)
                        signal_all(signal.SIGTERM)
                    else:
                        kill_all()
                        return None
                else:
                    os.read(wakeup, 4096)
            status = reap().get(pid)
            if status is not None:
                return status


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(1)
    except ConnectionResetError:
        return b""


def fork_child(run: Callable[[Request], int], close: Sequence[int]) -> Callable[[Request], int]:
    """Return a function that starts a unit by another fork, in a keeper that was forked from the warm parent. `run`:
    the unit's process calls this; its return value is the exit code. `close`: file descriptors of the keeper's that the
    unit must not have."""

    def start(request: Request) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            die_with_parent(keeper)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            limit_unit()
            for descriptor in close:
                os.close(descriptor)
            os.environ.update(request.environment)
            code = run(request)
        finally:
            # Not sys.exit: it would unwind into the warm parent's and the keeper's frames.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return start


def exec_child(messages: int, log: int, gate: int | None) -> Callable[[Request], int | None]:
    """Return a function that starts a unit in a new interpreter, under its wrapper if it has one, in a keeper with its
    own interpreter."""

    def start(request: Request) -> int | None:
        keeper = os.getpid()

        def prepare() -> None:
            die_with_parent(keeper)
            limit_unit()

        try:
            with tempfile.TemporaryFile() as stdin:
                if not request.wrap:
                    stdin.write(request.to_line())
                    stdin.seek(0)
                process = subprocess.Popen(
                    _command(request, messages, gate),
                    stdin=stdin,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **request.environment},
                    pass_fds=() if request.wrap else [messages, *([] if gate is None else [gate])],
                    process_group=0,
                    preexec_fn=prepare,
                )
        except OSError as error:
            os.write(log, f"the unit's process cannot be started: {error}\n".encode(errors="replace"))
            return None
        return process.pid

    return start


def _command(request: Request, messages: int, gate: int | None) -> list[str]:
    if not request.wrap:
        return program("workers", "child", str(messages), *([] if gate is None else [str(gate)]))
    request.file.write_bytes(request.to_line())
    return [*request.wrap, *program("workers", "wrapped", str(request.file))]


def main(control: int, messages: int, log: int, gate: int | None = None) -> None:
    """`python -m workers keeper`: keep one unit that runs in a new interpreter."""
    for descriptor in (control, messages, log, *([] if gate is None else [gate])):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    keep(socket.socket(fileno=control), messages, log, exec_child(messages, log, gate), gate)
