"""Lets warm parents, units and ranks be forks where users' are new interpreters: each is ready seconds sooner.

`python -m forkserver` (forkserver.py) has imported all that they import. A worker that it forks calls `prepare`. Then

- its first warm parent is a fork of that worker as it was before it opened anything, so it has one thread;
- with UNITS=forked, units that ask for a new interpreter are forked from the warm parent, too, unless they run under a
  command of their own;
- the ranks of a unit are forks of the unit's process.

A fork shows the command line and the variables that a new interpreter would show below /proc. Warm parents, units and
ranks in new interpreters are tested in tests/workers/processes/test_launch.py, tests/workers/processes/test_child.py
and tests/parallel/test_process_group.py.
"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flopwatch import packages
from flopwatch.packages import START

LARGEST_ORDER = 1 << 20
"""Bytes of a warm parent's order, at most: its variables."""
SHOWN_FIRST = ("FLOPWATCHED_BY", "RANK", "TORCHELASTIC_RUN_ID", "TMPDIR", "MISBEHAVE_FOLDER", "CHAOS_FOLDER")
"""Variables that somebody looks for below /proc."""


class Forked(subprocess.Popen[bytes]):
    """A child of this process that was forked here, to be used as if Popen had started it."""

    def __init__(self, pid: int, arguments: Sequence[str]) -> None:
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self.pid, self.args, self.returncode = pid, list(arguments), None
        self.stdin = self.stdout = self.stderr = None


def prepare() -> None:
    """Fork the worker's first warm parent now; call it in a worker's process before it starts. See the module."""
    from workers.processes import launch

    waiting = _WaitingWarmParent()
    started = launch.subprocess.Popen

    def start(arguments: Sequence[str], **options: Any) -> Any:
        if list(arguments[1:5]) == ["-P", START, "workers", "warm"] and waiting.is_there:
            return waiting.begin(arguments, options["env"], *options["pass_fds"])
        return started(arguments, **options)

    launch.subprocess = _Subprocess(start)  # type: ignore[assignment]
    if os.environ.get("UNITS") == "forked":
        original = launch.Launcher._start

        def start_unit(self: Any, request: Any, start: str, locks: Sequence[int], gate: Any) -> Any:
            is_new = request.wrap or gate is not None  # a fork has nothing to import, and does not wait at a gate
            return original(self, request, start if is_new else "fork", locks, gate)  # type: ignore[arg-type]

        launch.Launcher._start = start_unit  # type: ignore[method-assign]


class _Subprocess:
    """The module `subprocess` with another Popen."""

    def __init__(self, popen: Any) -> None:
        self.Popen = popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class _WaitingWarmParent:
    """A fork that waits to become the warm parent. It ends with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _run(lambda: _be_warm_parent(theirs))
        theirs.close()
        self._socket: socket.socket | None = ours

    @property
    def is_there(self) -> bool:
        return self._socket is not None

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str], descriptor: int) -> Forked:
        assert self._socket is not None
        with self._socket:
            order = json.dumps([list(arguments[:-1]), dict(environment)]).encode()
            socket.send_fds(self._socket, [order], [descriptor])
        self._socket = None
        return Forked(self._pid, arguments)


def _be_warm_parent(orders: socket.socket) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from workers.processes import warm

    order, descriptors, _, _ = socket.recv_fds(orders, LARGEST_ORDER, 1)
    orders.close()
    if not order:
        return  # the worker has ended
    arguments, environment = json.loads(order)
    os.setsid()
    become([*arguments, str(descriptors[0])], environment)
    subprocess_handler.SubprocessHandler._popen = _start_rank
    packages.hide()  # what plugins have imported by short names
    warm.main(descriptors[0])


def _start_rank(self: Any, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Fork a rank that runs `python -P -c PROGRAM`, as torch's launcher would start it."""
    _, *options, program = arguments
    assert options == ["-P", "-c"], options
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.closerange(3, 1 << 16)
        signal.set_wakeup_fd(-1)
        become(arguments, environment)
        _run(lambda: exec(program, {"__name__": "__main__"}))
    return Forked(pid, arguments)


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take over a command line and variables, also those that the kernel shows below /proc."""
    sys.orig_argv = list(arguments)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the one of that environment
    random.seed()
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = [name for name in SHOWN_FIRST if name in environment]
    names = first + [name for name in environment if name not in first]
    _show(*map(int, numbers[45:47]), arguments)
    _show(*map(int, numbers[47:49]), [f"{name}={environment[name]}" for name in names])


def _show(start: int, end: int, texts: Sequence[str]) -> None:
    """Overwrite the memory where the kernel finds texts: as many whole ones as there is room for."""
    content = b""
    for text in texts:
        line = os.fsencode(text) + b"\0"
        if len(content) + len(line) > end - start:
            break
        content += line
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _run(work: Any) -> NoReturn:
    """Do what a fork is there for, and end it."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
