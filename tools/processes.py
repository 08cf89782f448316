"""A pytest plugin that runs tests in several processes, all forked when the tests have been collected.

    python -m pytest -p tools.processes --processes 3

Collecting this suite takes ten seconds of a core, mostly for imports, so one process does it for all. Tests that are
marked `alone` run afterwards, in the first process.

A process gets the tests of one file at a time, so that they share what their module's fixtures start. Files that start
services come first, and in the end processes take over what others have not begun. Each process knows one test ahead:
pytest keeps fixtures for the next test. If a process dies, its test has failed, and another process takes its place.
If the first process is interrupted, or dies, the others take down what their fixtures have started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import random
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

UNDIVIDED = ("tests/browser", "tests/parallel")
"""Folders whose tests share something that takes seconds to start: Chromium, a pool of ranks."""
FIRST = (*UNDIVIDED, "tests/acceptance", "tests/tools", "tests/workers", "tests/benchmarks")
"""Folders with long tests."""
TEARDOWN_S = 30
"""For interrupted processes to take down what their fixtures have started; then they are killed."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --processes."""
    group = parser.getgroup("flopwatch")
    group.addoption("--processes", type=int, default=1, help="run the tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes, if that was asked for."""
    count = session.config.getoption("--processes")
    failed = session.testsfailed and not session.config.option.continue_on_collection_errors
    if count < 2 or failed or session.config.option.collectonly:
        return None
    alone = [item for item in session.items if item.get_closest_marker("alone") is not None]
    apart = set(alone)
    _Conductor(session, groups([item.nodeid if item not in apart else None for item in session.items])).run(count)
    for number, item in enumerate(alone):
        following = alone[number + 1] if number + 1 < len(alone) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        stop_if_asked(session)
    return True


def groups(nodeids: Sequence[str | None]) -> list[Group]:
    """Put the tests, whose numbers are their places, into groups, in the order in which they are to begin."""
    found: dict[str, Group] = {}
    for number, nodeid in enumerate(nodeids):
        if nodeid is None:
            continue
        file = nodeid.partition("::")[0]
        name = next((folder for folder in UNDIVIDED if file.startswith(f"{folder}/")), file)
        found.setdefault(name, Group(name)).numbers.append(number)
    last = len(FIRST)
    return sorted(found.values(), key=lambda group: next((i for i in range(last) if _is_in(group, FIRST[i])), last))


def _is_in(group: Group, folder: str) -> bool:
    return f"{group.name}/".startswith(f"{folder}/")


def stop_if_asked(session: pytest.Session) -> None:
    """End the run after as many failures as the user allows."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


@dataclass
class Group:
    """Tests that one process runs, unless another takes some over."""

    name: str
    numbers: deque[int] = field(default_factory=deque)

    def half(self) -> Group:
        """Take the later half away."""
        taken = Group(self.name)
        for _ in range(len(self.numbers) // 2):
            taken.numbers.appendleft(self.numbers.pop())
        return taken


@dataclass
class Worker:
    """A process, as the first one sees it."""

    name: str
    pid: int
    process: int
    """A descriptor of the process, which can be read when it has ended."""
    channel: socket.socket
    group: Group
    begun: deque[int] = field(default_factory=deque)
    """The test that it runs, and the test that it knows to be next."""
    received: bytes = b""
    why: str = ""
    """The error that it raised, if it ends because of one."""


class _Conductor:
    """Forks the processes, tells them what to run, and hands pytest their reports."""

    def __init__(self, session: pytest.Session, waiting: list[Group]) -> None:
        self._session = session
        self._waiting = deque(waiting)
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()

    def run(self, count: int) -> None:
        """Run all tests; it returns or raises when no process is left."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number in range(min(count, sum(len(group.numbers) for group in self._waiting))):
                self._fork(f"p{number + 1}")
            while self._workers:
                for key, _ in self._selector.select():
                    worker = key.data
                    if key.fd != worker.process:
                        self._hear(worker)
                    elif worker in self._workers:
                        self._ended(worker)
            stop_if_asked(self._session)
        finally:
            self._interrupt()
            self._selector.close()

    def _interrupt(self) -> None:
        """End the processes that are left, after the teardown of their fixtures if that does not take too long."""
        for worker in self._workers:
            signal.pidfd_send_signal(worker.process, signal.SIGINT)
        deadline = time.monotonic() + TEARDOWN_S
        for worker in self._workers:
            poller = select.poll()
            poller.register(worker.process, select.POLLIN)
            try:
                has_ended = poller.poll(1000 * max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:  # once more: the user does not wait
                has_ended, deadline = [], 0
            if not has_ended:
                signal.pidfd_send_signal(worker.process, signal.SIGKILL)
            self._close(worker)

    def _fork(self, name: str) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._workers:
                other.channel.close()
            _work(self._session, theirs, name)
        theirs.close()
        ours.setblocking(False)
        worker = Worker(name, pid, os.pidfd_open(pid), ours, Group(""))
        self._workers.append(worker)
        for file in (ours, worker.process):
            self._selector.register(file, selectors.EVENT_READ, worker)

    def _close(self, worker: Worker) -> int:
        """Wait for the end of a process; returns its exit code."""
        _, status = os.waitpid(worker.pid, 0)
        os.close(worker.process)
        worker.channel.close()
        return os.waitstatus_to_exitcode(status)

    def _hear(self, worker: Worker) -> bool:
        """Take what there is to hear; False if that is nothing."""
        try:
            chunk = worker.channel.recv(1 << 20)
        except OSError:
            return False
        *lines, worker.received = (worker.received + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["type"] == "next":
                self._answer(worker)
            elif message["type"] == "done":
                worker.begun.popleft()
            elif message["type"] == "exit":
                pytest.exit(message["reason"], message["returncode"])
            elif message["type"] == "raised":
                worker.why = message["traceback"]
            else:
                self._report(worker, self._load(message["report"]))
        return bool(chunk)

    def _answer(self, worker: Worker) -> None:
        number = self._next_for(worker)
        if number is not None:
            worker.begun.append(number)
        with contextlib.suppress(OSError):  # it has died: _hear is told
            worker.channel.sendall(json.dumps(number).encode() + b"\n")

    def _next_for(self, worker: Worker) -> int | None:
        if self._session.shouldfail or self._session.shouldstop:
            return None
        if not worker.group.numbers:
            worker.group = self._waiting.popleft() if self._waiting else self._taken_over()
        return worker.group.numbers.popleft() if worker.group.numbers else None

    def _taken_over(self) -> Group:
        others = [worker.group for worker in self._workers if worker.group.name not in UNDIVIDED]
        most = max(others, key=lambda group: len(group.numbers), default=None)
        if most is None or not most.numbers:
            return Group("")
        return most.half() if len(most.numbers) > 1 else Group(most.name, deque([most.numbers.pop()]))

    def _ended(self, worker: Worker) -> None:
        for file in (worker.channel, worker.process):
            self._selector.unregister(file)
        while self._hear(worker):
            continue
        self._workers.remove(worker)
        code = self._close(worker)
        if code == 0 and not worker.begun:
            return
        how = f"has ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}\n{worker.why}".strip()
        if not worker.begun:  # nor would another process get further
            raise RuntimeError(f"a process that was to run tests {how}")
        item = self._session.items[worker.begun.popleft()]
        text = f"the process that ran this test {how}"
        self._report(worker, pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
        worker.group.numbers.extendleft(reversed(worker.begun))
        if worker.group.numbers or self._waiting:
            self._waiting.appendleft(worker.group)
            self._fork(worker.name)

    def _load(self, data: dict[str, Any]) -> Any:
        config = self._session.config
        return config.hook.pytest_report_from_serializable(config=config, data=data)

    def _report(self, worker: Worker, report: Any) -> None:
        # As with pytest-xdist: the terminal shows no file, but with -v the process.
        report.node = SimpleNamespace(gateway=SimpleNamespace(id=worker.name), _workerinfocache=f"[{worker.name}]")
        self._session.config.hook.pytest_runtest_logreport(report=report)


class _Reporter:
    """Sends the reports of a process's tests to the first process."""

    def __init__(self, config: pytest.Config, channel: socket.socket) -> None:
        self._config, self._channel = config, channel
        self._answers = channel.makefile("rb")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send one report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.send("report", report=data)

    def send(self, type_: str, **content: Any) -> None:
        """Send one message."""
        self._channel.sendall(json.dumps({"type": type_, **content}, default=str).encode() + b"\n")

    def send_error(self, error: BaseException) -> None:
        """Send what ends this process."""
        if isinstance(error, pytest.exit.Exception):
            self.send("exit", reason=error.msg, returncode=error.returncode)
        elif not isinstance(error, KeyboardInterrupt):
            self.send("raised", traceback="".join(traceback.format_exception(error)))

    def next(self) -> int | None:
        """Ask for the number of the next test; None if there is none."""
        self.send("next")
        line = self._answers.readline()
        number: int | None = json.loads(line) if line else None
        return number


def _work(session: pytest.Session, channel: socket.socket, name: str) -> NoReturn:
    """Be one of the processes."""
    code = 1
    try:
        # Should the first process die, it is as if it had been interrupted. Shells let their jobs ignore that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        reporter = _Reporter(session.config, channel)
        try:
            with _silent(session.config):
                _run_tests(session, reporter, name)
            code = 0
        except BaseException as error:  # noqa: BLE001 - it is told, and the first process sees this one's end
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal, and that of the first process
            with contextlib.suppress(OSError):
                reporter.send_error(error)
            session._setupstate.teardown_exact(None)
    finally:
        # As an interpreter that ends, but without pytest's end of a session, which is the first process's.
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _silent(config: pytest.Config) -> Iterator[None]:
    """Print nothing here, and capture what tests print in files of this process's own."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    with open(os.devnull, "w") as null:  # noqa: PTH123 - a constant of os
        terminal._tw._file = null
        yield


def _run_tests(session: pytest.Session, reporter: _Reporter, name: str) -> None:
    random.seed()
    folders: Any = getattr(session.config, "_tmp_path_factory", None)
    if folders is not None and folders._given_basetemp is not None:  # pytest empties it, and another uses it
        folders._given_basetemp.mkdir(exist_ok=True)
        folders._given_basetemp /= name
    # With a process per core, further threads of torch in each would mostly wait for each other.
    if "torch" in sys.modules and os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":
        sys.modules["torch"].set_num_threads(1)
    session.config.pluginmanager.register(reporter, "reporter of this process")
    number = reporter.next()
    while number is not None:
        item, number = session.items[number], reporter.next()
        following = session.items[number] if number is not None else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        reporter.send("done")
