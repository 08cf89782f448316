"""The write lock: it lets one write transaction run at a time, over all threads and processes of a host.

SQLite has one writer at a time too, but its waiters poll: under load the unlucky one waits for seconds. Here they
queue. Threads of a process take turns in order of arrival; the one whose turn it is waits for the other processes in
flock(2).

A blocking flock cannot be given a deadline, and a writer can stop for ever (SIGSTOP) while it holds the lock. So a
helper thread makes the blocking call, and the waiter waits for that thread with a deadline. A helper whose waiter gave
up keeps its place in the kernel's queue, and the next waiter of the process takes that place over; if no thread waits
when the lock arrives, the helper releases it at once. Each lock has one helper, which starts with the lock's first use
and stays: on a host that is out of threads no writer needs a new one.
"""

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from app.errors import DatabaseBusy


class _Patience:
    """The time that a request waits for the first of its writes to begin."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._began = False

    def left(self, timeout_s: float) -> float:
        if self._began:
            return timeout_s
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
        return max(0.0, min(timeout_s, self._deadline - time.monotonic()))

    def write_began(self) -> None:
        self._began = True


_patience: ContextVar[_Patience | None] = ContextVar("patience", default=None)


@contextmanager
def patience(timeout_s: float) -> Iterator[None]:
    """Inside this context, also in threads started there, the first write waits for `timeout_s` seconds at most.

    The time runs from the first attempt to write, since a request may compute for seconds before it. Later writes of
    the request wait for their usual timeout, since part of the work is done.
    """
    token = _patience.set(_Patience(timeout_s))
    try:
        yield
    finally:
        _patience.reset(token)


class Lock(Protocol):
    """A lock of writers."""

    def hold(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold it; raises DatabaseBusy if it was not free within `timeout_s` seconds."""
        ...


@contextmanager
def hold(lock: Lock, timeout_s: float) -> Iterator[None]:
    """Hold the lock; raises DatabaseBusy if it was not free within `timeout_s` seconds, or when `patience` ended."""
    request = _patience.get()
    with lock.hold(timeout_s if request is None else request.left(timeout_s)):
        if request is not None:
            request.write_began()
        yield


class TurnLock:
    """A mutual exclusion lock that is handed to waiting threads in the order of their arrival."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; returns False if it was not free within `timeout_s` seconds."""
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(timeout_s):
            return True
        with self._guard:
            if turn.is_set():  # the lock came between the timeout and the guard
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


class _Helper:
    """A thread that waits in flock(2) on one descriptor for the threads of this process, one at a time. Raises
    RuntimeError if the thread cannot start."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._wanted = False
        self._blocked = False
        """The helper is in flock, or about to be."""
        self._arrived = False
        """The lock is held for the waiter."""
        self._closed = False
        threading.Thread(target=self._serve, name="write-lock", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._blocked or self._closed)
                if not self._blocked:
                    os.close(self._descriptor)
                    return
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            with self._changed:
                self._blocked = False
                if self._wanted:
                    self._arrived = True
                    self._changed.notify_all()
                else:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def lock(self, deadline: float) -> bool:
        """Take the lock; returns False if it was not free until `deadline` (time.monotonic)."""
        with self._changed:
            if not self._blocked:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._blocked = True
                    self._changed.notify_all()
                else:
                    return True
            self._wanted = True
            arrived = self._changed.wait_for(lambda: self._arrived, max(0.0, deadline - time.monotonic()))
            self._wanted = self._arrived = False
            return arrived

    def unlock(self) -> None:
        """Release the lock explicitly: a process forked meanwhile may have a copy of the descriptor."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """End the thread, which closes the file; while it waits for the lock, once that has come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close_copy(self) -> None:
        """In a forked child, which has no copy of the thread: close the copy of the descriptor."""
        os.close(self._descriptor)


class WriteLock:
    """An exclusive lock on a file of its own.

    It must not be the database's file: closing any descriptor of that file would drop SQLite's own locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = TurnLock()
        self._helper: _Helper | None = None

    def prepare(self) -> None:
        """Open the file and start the helper now, so that no writer needs a thread later."""
        if self._helper is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._helper = _Helper(descriptor)
            except RuntimeError as error:
                os.close(descriptor)
                raise DatabaseBusy(f"No thread can be started to wait for {self._path}: {error}.") from error

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock; raises DatabaseBusy if it was not free within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout_s):
            raise self._busy(timeout_s)
        try:
            self.prepare()
            helper = self._helper
            assert helper is not None
            if not helper.lock(deadline):
                raise self._busy(timeout_s)
            try:
                yield
            finally:
                helper.unlock()
        finally:
            self._turn.release()

    def _busy(self, timeout_s: float) -> DatabaseBusy:
        return DatabaseBusy(f"Another process has been writing for longer than {timeout_s:g} s ({self._path}).")

    def close(self) -> None:
        """Close the file and end the helper. If it waits for the lock, both happen when that has come."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def forget(self) -> None:
        """In a forked child: close the copy of the descriptor, which would keep a dead parent's lock alive."""
        if self._helper is not None:
            self._helper.close_copy()
            self._helper = None
        self._turn = TurnLock()
