"""Units that start ahead of their turn: together, and let through one by one."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tools.waiting import wait_until
from workers.agent.ahead import Ahead
from workers.outcome import HostExhausted
from workers.processes import keeper


class Started:
    """A process that has been started behind a gate."""

    def __init__(self, unit: str, gate: socket.socket) -> None:
        self.unit = unit
        self.gate = gate.dup()
        self.gate.settimeout(20)
        self.is_closed = False

    def import_all(self) -> None:
        self.gate.sendall(keeper.READY)

    def has_begun(self) -> bool:
        self.gate.setblocking(False)
        try:
            return self.gate.recv(1) == keeper.READY
        except BlockingIOError:
            return False

    def die(self) -> None:
        self.gate.close()

    def close(self) -> None:
        self.is_closed = True


class Host:
    """Starts such processes; `imports` is what each does then."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.imports: Callable[[Started], None] = Started.import_all
        self.room = 100
        self.full: Exception = HostExhausted("no room")
        self.stop, self.stop_in = os.pipe()
        self.ahead = Ahead(self.start, self.stop)  # type: ignore[arg-type]

    def start(self, unit: str, gate: socket.socket) -> Started:
        if len(self.started) == self.room:
            raise self.full
        process = Started(unit, gate)
        self.started.append(process)
        self.imports(process)
        return process


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.ahead.close()
    for process in host.started:
        process.gate.close()
    os.close(host.stop)
    os.close(host.stop_in)


UNITS = ["a", "b", "c"]


def test_units_begin_one_by_one_after_all_have_imported(host: Host) -> None:
    host.imports = lambda _process: None
    waiting = threading.Thread(target=host.ahead.start, args=(UNITS,))
    waiting.start()
    wait_until(lambda: len(host.started) == 3, "the processes")
    for process in host.started[:2]:
        process.import_all()
    assert waiting.is_alive()
    assert not any(process.has_begun() for process in host.started)
    host.started[2].import_all()
    waiting.join(20)
    assert not waiting.is_alive()
    for index, unit in enumerate(UNITS):
        assert host.ahead.take(unit) is host.started[index]
        assert [process.has_begun() for process in host.started[index:]] == [True, *[False] * (2 - index)]
    assert host.ahead.take("d") is None


def test_a_job_that_must_end_does_not_wait(host: Host) -> None:
    host.imports = lambda _process: None
    os.write(host.stop_in, b"s")
    host.ahead.start(UNITS)
    host.ahead.close()
    assert all(process.is_closed for process in host.started)
    assert host.ahead.take("a") is None


def test_a_unit_that_dies_while_it_imports_ends_no_other(host: Host) -> None:
    host.imports = lambda process: process.die() if process.unit == "a" else process.import_all()
    host.ahead.start(UNITS)
    assert host.ahead.take("a") is host.started[0]
    assert host.ahead.take("b") is host.started[1]


@pytest.mark.parametrize("error", [HostExhausted("full"), OSError(errno.EAGAIN, "full")], ids=repr)
def test_without_room_each_starts_when_it_is_its_turn(host: Host, error: Exception) -> None:
    host.room, host.full = 2, error
    host.ahead.start(UNITS)
    assert [process.is_closed for process in host.started] == [True, True]
    assert host.ahead.take("a") is None
