"""The write lock, between threads and between real processes, one of which stops while it holds it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import DatabaseBusy
from app.store.database import locking
from app.store.database.locking import TurnLock, WriteLock
from tests.clock import Clock
from tools.waiting import wait_until

HOLDER = """
import sys, time
from pathlib import Path
from app.store.database.locking import WriteLock
with WriteLock(Path(sys.argv[1])).hold(60):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db.lock"


class Holder:
    """A process that holds the lock until it is told to let go."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "held\n"

    def let_go(self) -> None:
        self.process.communicate("\n", timeout=20)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(path: Path) -> Iterator[Holder]:
    holder = Holder(path)
    yield holder
    holder.end()


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "write-lock"]


def helper_waits(lock: WriteLock) -> bool:
    return lock._helper is not None and lock._helper._blocked


def test_turns_come_in_the_order_of_arrival() -> None:
    lock, order = TurnLock(), []
    assert lock.acquire(1)

    def take(number: int) -> None:
        assert lock.acquire(20)
        order.append(number)
        lock.release()

    threads = []
    for number in range(10):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        wait_until(lambda: len(lock._waiting) == len(threads))
    lock.release()
    for thread in threads:
        thread.join()
    assert order == list(range(10))


def test_a_turn_that_nobody_waits_for_any_more_is_not_lost() -> None:
    lock = TurnLock()
    assert lock.acquire(1)
    assert not lock.acquire(0.01)
    lock.release()
    assert lock.acquire(0)


def test_threads_exclude_each_other(path: Path) -> None:
    lock, inside, worst, all_there = WriteLock(path), [0], [0], threading.Barrier(6)

    def work() -> None:
        all_there.wait(60)
        for _ in range(30):
            with lock.hold(30):
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                time.sleep(0.0002)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst[0] == 1
    lock.close()


def test_two_locks_of_one_process_exclude_each_other(path: Path) -> None:
    one, two = WriteLock(path), WriteLock(path)
    with one.hold(1), pytest.raises(DatabaseBusy), two.hold(0.05):
        pass
    wait_until(lambda: not helper_waits(two))
    with two.hold(20):
        pass
    one.close()
    two.close()


def test_a_stopped_holder_lets_nobody_hang(path: Path, holder: Holder) -> None:
    lock, before = WriteLock(path), set(helpers())
    os.kill(holder.process.pid, signal.SIGSTOP)
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(DatabaseBusy, match=r"longer than 0\.1 s"), lock.hold(0.1):
            pass
        assert time.monotonic() - started < 5
    assert len(set(helpers()) - before) == 1  # one waits in the kernel, however many gave up
    assert helper_waits(lock)
    os.kill(holder.process.pid, signal.SIGCONT)
    holder.let_go()
    with lock.hold(20):
        pass
    assert not helper_waits(lock)
    lock.close()
    wait_until(lambda: not set(helpers()) - before)


def test_a_lock_that_arrives_when_nobody_wants_it_is_released(path: Path, holder: Holder) -> None:
    lock = WriteLock(path)
    with pytest.raises(DatabaseBusy), lock.hold(0.05):
        pass
    holder.let_go()
    wait_until(lambda: not helper_waits(lock))
    # Others get it at once, although this process asked first.
    Holder(path).let_go()
    with lock.hold(20):
        pass
    lock.close()


def test_a_host_without_threads_keeps_no_writer_from_its_turn(path, holder, monkeypatch) -> None:
    """The helper is there already when somebody else holds the lock and the host has no thread left."""
    lock = WriteLock(path)
    lock.prepare()
    start = threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "write-lock":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    for _ in range(2):
        with pytest.raises(DatabaseBusy, match="longer than"), lock.hold(0.02):
            pass
    holder.let_go()
    with lock.hold(20):
        pass
    lock.close()


class Waits:
    """A lock that notes how long each attempt may wait, and is free only in the attempts that the test names."""

    def __init__(self, *free: bool) -> None:
        self.waited: list[float] = []
        self._free = iter(free)

    @contextlib.contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        self.waited.append(timeout_s)
        if not next(self._free):
            raise DatabaseBusy("Others write.")
        yield


def test_patience_runs_from_the_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request computes before it writes does not count, such as the validation of a large sweep."""
    clock, lock = Clock(), Waits(False, False, True, True)
    monkeypatch.setattr(locking, "time", SimpleNamespace(monotonic=clock))  # not in the whole process
    with locking.patience(5):
        for _ in range(4):
            clock.now += 3
            with contextlib.suppress(DatabaseBusy), locking.hold(lock, 10):  # type: ignore[arg-type]
                pass
    assert lock.waited == [5, 2, 0, 10]


def test_a_forked_child_has_neither_the_lock_nor_its_helper(path: Path) -> None:
    lock = WriteLock(path)
    lock.prepare()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock.forget()
            with lock.hold(5):
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with lock.hold(5):
        pass
    lock.close()


def test_a_holder_that_is_killed_lets_go(path: Path, holder: Holder) -> None:
    lock = WriteLock(path)
    holder.end()
    with lock.hold(20):
        pass
    lock.close()


def test_a_holders_child_does_not_keep_the_lock(path: Path) -> None:
    """A process that is started while the lock is held must not inherit it."""
    lock = WriteLock(path)
    with lock.hold(1):
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    lock.close()
    try:
        with WriteLock(path).hold(1):
            pass
    finally:
        child.communicate()
