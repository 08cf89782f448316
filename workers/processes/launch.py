"""The only code that starts a job's processes: a keeper for each unit, forked from the warm parent or exec'd."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from app.importing import program
from app.settings import OBJECT_STORES, PREFIX
from flopwatch.packages import without_checkout
from workers.devices.locks import lock_folder
from workers.outcome import HostExhausted, InvalidEnvironment
from workers.processes import keeper, warm
from workers.processes.leftovers import VARIABLE, end_leftovers, own_mark
from workers.processes.linux import adopt_orphans, end_tree, kill_all, reap

WARM_TIMEOUT_S = 300.0
"""Seconds that the warm parent's imports may take, also on a slow disk with a cold cache."""
WARM_END_S = 5.0
"""Seconds in which a process must end after its socket was closed."""
WARM_TRIES = 5
"""Number of times that a warm parent is started again if each is killed, for example by a kernel that lacks memory."""
KILLED_TOO_OFTEN = f"the warm parent was killed {WARM_TRIES} times in a row"

NOT_FORKED = "the host has no processes left: the warm parent could not fork (see `ulimit -u`, --pids-limit, TasksMax)"

ENDS_S = 60.0
"""Seconds that killed processes may take to end, before nobody waits for them any more."""
FORK_TIMEOUT_S = 30.0
"""Seconds in which the warm parent, which forks in milliseconds, must answer."""


@dataclass(frozen=True)
class Report:
    """The end of a unit's process: an exit code or a signal; neither if its keeper was killed."""

    exit_code: int | None
    signal: int | None


class Process:
    """A unit's process, as the agent holds it.

    `messages` and `log` end when no process holds them open, `control` when the keeper is gone. To wait for the end,
    read all three, since a unit may close its pipes and continue.
    """

    def __init__(
        self,
        control: socket.socket,
        messages: int,
        log: int,
        *,
        on_close: Callable[[], None],
        kept_by: psutil.Process | None = None,
    ) -> None:
        self.control = control
        self.messages = messages
        self.log = log
        self._kept_by = kept_by
        self._on_close = on_close
        self._received = bytearray()

    def terminate(self) -> None:
        """Send SIGTERM to the unit's process and all its descendants."""
        self._order(keeper.TERMINATE)

    def kill(self) -> None:
        """Kill the unit's process and all its descendants."""
        self._order(keeper.KILL)

    def kill_with_keeper(self) -> bool:
        """Kill all processes of the unit and its keeper, if the keeper does not obey, for example because it is
        stopped. Returns False if that is impossible: then the keeper goes on to hold the unit's devices."""
        return self._kept_by is None or end_tree(self._kept_by, ENDS_S)

    def report(self) -> Report:
        """Wait for the keeper's report; when it comes, no process of the unit is left."""
        while self.read_report():
            continue
        return Report(**json.loads(self._received)) if self._received else Report(exit_code=None, signal=None)

    def read_report(self) -> bool:
        """Read what has arrived of the keeper's report; returns False once the keeper is gone."""
        try:
            chunk = self.control.recv(4096)
        except ConnectionResetError:  # our order came after the keeper had ended
            return False
        self._received += chunk
        return bool(chunk)

    def close(self) -> None:
        """Close the pipes; the keeper, if it still runs, ends everything then."""
        self._on_close()
        self.control.close()
        os.close(self.messages)
        os.close(self.log)

    def _order(self, order: bytes) -> None:
        # It may have ended already.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(order)


class _WarmParentDied(Exception):
    """The warm parent was killed before it answered."""


class Launcher:
    """Starts units. An agent has one, and several of its threads may call it."""

    def __init__(self) -> None:
        adopt_orphans()
        self._lock = threading.Lock()
        self._warm: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._keepers: set[int] = set()
        self._forked: set[int] = set()
        self._mark = own_mark(lock_folder())

    def start_warm(self) -> None:
        """Start the warm parent without waiting for its imports."""
        with self._lock:
            self._ensure_warm()

    def wait_until_warm(self) -> None:
        """Wait for the warm parent's imports. Raises InvalidEnvironment: the warm parent died; its standard error gives
        the reason."""
        for _ in range(WARM_TRIES):
            with self._lock, contextlib.suppress(_WarmParentDied):
                self._warm_socket()
                return
        raise InvalidEnvironment(KILLED_TOO_OFTEN)

    def start(
        self,
        request: keeper.Request,
        start: Literal["fork", "exec"],
        locks: Sequence[int],
        *,
        gate: socket.socket | None = None,
    ) -> Process:
        """Start one unit.

        Args:
            start: "fork" from the warm parent, "exec" a new interpreter.
            locks: file descriptors that the keeper holds open as long as a process of the unit lives.
            gate: the unit's end of the socket at which it waits after its imports (see keeper.py); only for "exec"
                without a wrapper.

        Raises:
            InvalidEnvironment: the warm parent cannot start, or this host lacks the command that the unit runs under.
            HostExhausted: the warm parent could not fork.
            OSError: this process could not fork; `is_exhausted` says whether the host lacks a resource.
        """
        _check_wrapper(request)
        for _ in range(WARM_TRIES):
            # If the warm parent is killed, a try may leave a keeper, which ends at once, since the other end of its
            # socket is closed. The next try has pipes of its own.
            with contextlib.suppress(_WarmParentDied):
                return self._start(request, start, locks, gate)
        raise InvalidEnvironment(KILLED_TOO_OFTEN)

    def _start(
        self, request: keeper.Request, start: Literal["fork", "exec"], locks: Sequence[int], gate: socket.socket | None
    ) -> Process:
        with contextlib.ExitStack() as of_keeper, contextlib.ExitStack() as on_error:
            ours, theirs = socket.socketpair()
            on_error.callback(ours.close)
            of_keeper.callback(theirs.close)
            log, log_in = os.pipe2(os.O_CLOEXEC)
            on_error.callback(os.close, log)
            of_keeper.callback(os.close, log_in)
            messages, messages_in = _fifo(request) if request.wrap else os.pipe2(os.O_CLOEXEC)
            on_error.callback(os.close, messages)
            of_keeper.callback(os.close, messages_in)
            descriptors = [theirs.fileno(), messages_in, log_in, *locks]
            with self._lock:
                self._end_orphans()
                pid = self._fork(descriptors) if start == "fork" else self._exec(descriptors, gate)
                kept_by = _process(pid)
            on_error.pop_all()
        process = Process(ours, messages, log, on_close=lambda: self._forked.discard(pid), kept_by=kept_by)
        # The keeper died at once; the agent sees that its report is missing.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ours.sendall(request.to_line())
        return process

    def end_orphans(self) -> None:
        """End the processes that a killed keeper or warm parent left behind. Call it often: it is cheap and does not
        wait."""
        if self._lock.acquire(blocking=False):  # if the lock is held, a unit is being started, which does the same
            try:
                self._end_orphans()
            finally:
                self._lock.release()

    def end_leftovers(self) -> list[int]:
        """Kill the processes that killed agents have left on this agent's devices; returns their pids."""
        return end_leftovers(self._mark)

    def close(self) -> None:
        """End the warm parent and every process below this one."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            kill_all(within_s=ENDS_S)
            if self._warm is not None:
                self._warm.wait()
            self._warm = None

    def _fork(self, descriptors: list[int]) -> int:
        """Let the warm parent fork a keeper; return its pid. Raises HostExhausted if it could not fork."""
        warm_parent = self._warm_socket()
        try:
            socket.send_fds(warm_parent, [warm.FORK], descriptors)
            answer = warm_parent.recv(warm.PID.size, socket.MSG_WAITALL)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        except TimeoutError:  # it is stopped; a new one replaces it, and its keepers continue
            assert self._warm is not None
            self._warm.kill()
            answer = b""
        if len(answer) < warm.PID.size:
            self._drop_warm()
            raise _WarmParentDied
        (pid,) = warm.PID.unpack(answer)
        if pid == warm.NOT_FORKED:
            raise HostExhausted(NOT_FORKED)
        self._forked.add(pid)
        return int(pid)

    def _exec(self, descriptors: list[int], gate: socket.socket | None) -> int:
        at_gate = [] if gate is None else [gate.fileno()]
        process = subprocess.Popen(
            program("workers", "keeper", *map(str, [*descriptors[:3], *at_gate])),
            stdin=subprocess.DEVNULL,
            env=units_environment(self._mark),
            pass_fds=[*descriptors, *at_gate],
            start_new_session=True,
        )
        self._keepers.add(process.pid)
        process.returncode = 0  # reaped by _end_orphans, not by Popen's destructor
        return process.pid

    def _end_orphans(self) -> None:
        """Reap keepers that ended, and end the processes that this one adopted from killed keepers and warm parents."""
        warm_pid = self._warm.pid if self._warm is not None else None
        ended = reap()
        if self._warm is not None and warm_pid in ended:
            self._warm.returncode = os.waitstatus_to_exitcode(ended[self._warm.pid])
            self._drop_warm()
        if ended:
            self._keepers -= ended.keys()
            # This process has also adopted the keepers of a killed warm parent; they keep their units as before.
            spare = self._keepers | self._forked | ({self._warm.pid} if self._warm is not None else set())
            kill_all(spare)

    def _ensure_warm(self) -> None:
        if self._warm is not None and self._warm.poll() is None:
            return
        self._drop_warm()
        ours, theirs = socket.socketpair()
        with theirs:
            self._warm = subprocess.Popen(
                program("workers", "warm", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                env=units_environment(self._mark),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._ready = False

    def _drop_warm(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        if self._warm is not None and self._warm.returncode is None:
            self._warm.returncode = 0  # reaped by _end_orphans, as above
        self._warm = None

    def _warm_socket(self) -> socket.socket:
        self._ensure_warm()
        assert self._socket is not None
        if not self._ready:
            self._socket.settimeout(WARM_TIMEOUT_S)
            timed_out = False
            try:
                answer = self._socket.recv(1)
            except TimeoutError:
                assert self._warm is not None
                self._warm.kill()
                answer, timed_out = b"", True
            if answer != warm.READY:
                if not timed_out and self._warm_was_killed():
                    self._drop_warm()
                    raise _WarmParentDied
                self._drop_warm()
                raise InvalidEnvironment("the warm parent could not start; the worker's log has its error")
            self._socket.settimeout(FORK_TIMEOUT_S)
            self._ready = True
        return self._socket

    def _warm_was_killed(self) -> bool:
        """Return True if somebody killed the warm parent, whose socket has ended; False if it ended by itself."""
        assert self._warm is not None
        try:
            return self._warm.wait(timeout=WARM_END_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False


def units_environment(mark: str) -> dict[str, str]:
    """Return this process's variables without the service's settings and the credentials of its database and object
    store, which a unit does not need, and with the agent's mark.

    They are set where a new interpreter starts, not in the unit: a process's first variables can be read below /proc as
    long as it and its forks live.
    """
    store = os.environ.get("FLOPWATCH_ARTIFACTS_URL", "").partition("://")[0]
    hidden = (PREFIX, "PGPASSWORD", OBJECT_STORES.get(store, PREFIX))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    if path := kept.get("PYTHONPATH"):
        kept["PYTHONPATH"] = os.pathsep.join(without_checkout(path.split(os.pathsep)))
    return {**kept, VARIABLE: mark}


def _process(pid: int) -> psutil.Process | None:
    """Return the process of this pid. The object keeps referring to the same process, even if the pid is used again."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _check_wrapper(request: keeper.Request) -> None:
    if not request.wrap:
        return
    command, path = request.wrap[0], request.environment.get("PATH", os.environ.get("PATH"))
    if shutil.which(command, path=path) is None:
        raise InvalidEnvironment(f"the unit runs under {command!r}, which is not installed here: not found on PATH")


def _fifo(request: keeper.Request) -> tuple[int, int]:
    """Open both ends of a FIFO in the unit's scratch folder; the unit opens it by its name (see keeper.py)."""
    os.mkfifo(request.fifo, 0o600)
    reader = os.open(request.fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else it waits for a writer
    try:
        writer = os.open(request.fifo, os.O_WRONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(reader)
        raise
    os.set_blocking(reader, True)
    return reader, writer
