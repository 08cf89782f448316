"""`pytest --processes=N`: collects the tests once, and runs them in N forks of that process, side by side; those that
are marked `alone` run afterwards, in one more.

Each worker of pytest-xdist would collect for itself, which takes some 12 s of processor time for the whole suite.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

CHUNK = struct.Struct("II")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="run the tests side by side in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    run = Run(session, count)
    try:
        run.follow()
        run.follow_alone()
    finally:
        run.stop()
    return True


def chunks(items: Sequence[pytest.Item], processes: int) -> list[tuple[int, int]]:
    """Return the parts, from and to, that the processes take in turn, the largest first.

    They get smaller and smaller, so that all end together (guided self-scheduling, Polychronopoulos and Kuck 1987), but
    for those in which tests share a fixture: none of a package, module or class is made in two of them.
    """
    last = {fixture: index for index, item in enumerate(items) for fixture in shared_fixtures(item)}
    # A test of acceptance, which starts servers and workers, takes as long as several others.
    before = [0, *itertools.accumulate(5 if item.get_closest_marker("acceptance") else 1 for item in items)]
    parts, start = [], 0
    while start < len(items):
        most, stop, end = (before[-1] - before[start]) // (8 * processes), start, start + 1
        while stop < end:
            end = max(end, *(last[fixture] + 1 for fixture in shared_fixtures(items[stop])), 0)
            stop += 1
            if stop == end < len(items) and before[end + 1] - before[start] <= most:
                end += 1
        parts.append((start, stop))
        start = stop
    return sorted(parts, key=lambda part: before[part[0]] - before[part[1]])


def shared_fixtures(item: pytest.Item) -> set[tuple[Path, str]]:
    """Return the fixtures of a test that other tests of its file, or folder, may share."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    where = {"class": item.path, "module": item.path, "package": item.path.parent}
    return {(where[found[-1].scope], name) for name, found in known.items() if found[-1].scope in where}


def is_alone(item: pytest.Item) -> bool:
    """Tell whether a test judges times or fills a device, so that nothing else may run meanwhile."""
    return item.get_closest_marker("alone") is not None


class Run:
    """The processes and what they have to do."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        self._config = session.config
        session.items.sort(key=is_alone)
        together = [item for item in session.items if not is_alone(item)]
        self._together = len(together)
        self._chunks, filled = os.pipe()  # a process takes a part by reading it
        os.write(filled, b"".join(itertools.starmap(CHUNK.pack, chunks(together, count))))
        os.close(filled)
        self._temporary: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._parts: dict[Connection, tuple[BaseProcess, deque[int]]] = {}
        self._started = 0
        for _ in range(count):
            self._start([])

    def _start(self, owed: list[int]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._started += 1
        folder = self._temporary / f"process-{self._started}"
        process = multiprocessing.get_context("fork").Process(target=self._work, args=(theirs, owed, folder))
        process.start()
        theirs.close()
        self._parts[ours] = process, deque(owed)

    def follow(self) -> None:
        """Pass the reports on until all processes have ended; another one continues the work of one that died."""
        while self._parts:
            wait(self._parts, timeout=1)
            for connection, (process, owed) in list(self._parts.items()):
                ended = not process.is_alive()
                with contextlib.suppress(EOFError):
                    while connection.poll():
                        self._take(connection.recv(), owed)
                if ended:
                    del self._parts[connection]
                    self._account(process, list(owed))

    def follow_alone(self) -> None:
        """Run what must not run beside others."""
        if alone := [*range(self._together, len(self._session.items))]:
            self._start(alone)
            self.follow()

    def _take(self, message: Any, owed: deque[int]) -> None:
        match message:
            case range():
                owed.extend(message)
            case int():
                owed.popleft()
            case _:
                hook = self._config.hook
                report = hook.pytest_report_from_serializable(config=self._config, data=message)
                hook.pytest_runtest_logreport(report=report)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)

    def _account(self, process: BaseProcess, owed: list[int]) -> None:
        if not owed:
            assert process.exitcode == 0
            return
        item = self._session.items[owed[0]]
        reason = f"the process that ran this test ended with exit code {process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        if owed[1:]:
            self._start(owed[1:])

    def stop(self) -> None:
        """End the processes that still run: Ctrl-C, or as many failures as --maxfail allows."""
        for process, _ in self._parts.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process, _ in self._parts.values():
            process.join()
        os.close(self._chunks)

    def _work(self, parent: Connection, owed: list[int], folder: Path) -> None:
        """Run first these tests, then parts; in a process of its own."""
        plugins = self._config.pluginmanager
        plugins.register(Messenger(self._config, parent), "terminalreporter")
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the parent
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folder.mkdir()
        self._config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]

        def indices() -> Iterator[int]:
            yield from owed
            while part := os.read(self._chunks, CHUNK.size):
                taken = range(*CHUNK.unpack(part))
                parent.send(taken)
                yield from taken

        items = [*self._session.items, None]
        try:
            for index, following in itertools.pairwise(itertools.chain(indices(), [-1])):
                self._config.hook.pytest_runtest_protocol(item=items[index], nextitem=items[following])
                parent.send(index)
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):  # a test that was interrupted in its setup
                self._session._setupstate.teardown_exact(None)


class Messenger:
    """Sends reports to the process that started this one, in place of pytest's reporter."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config = config
        self._parent = parent
        self._tw = config.get_terminal_writer()  # pytest-timeout writes stacks there
        config.pluginmanager.unregister(name="terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._parent.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
