"""The write lock: it lets one write transaction run at a time, over all threads and processes of a host.

SQLite has one writer at a time too, but its waiters poll: under load the unlucky one waits for seconds. Here they
queue. Threads of a process take turns in order of arrival; the one whose turn it is waits for the other processes in
flock(2).

A blocking flock cannot be given a deadline, and a writer can stop for ever (SIGSTOP) while it holds the lock. So the
blocking call is made by a helper thread, and the waiter waits for that thread with a deadline. A helper whose waiter
gave up keeps its place in the kernel's queue. The next waiter of the process adopts it, so that there is at most one
helper; if no thread waits when the lock arrives, the helper releases it at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from app.errors import DatabaseBusy


class _Patience:
    """The time that a request waits for the first of its writes to begin."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline: float | None = time.monotonic() + timeout_s

    def left(self, timeout_s: float) -> float:
        if self._deadline is None:
            return timeout_s
        return max(0.0, min(timeout_s, self._deadline - time.monotonic()))

    def rewarded(self) -> None:
        self._deadline = None


_patience: ContextVar[_Patience | None] = ContextVar("patience", default=None)


@contextmanager
def patience(timeout_s: float) -> Iterator[None]:
    """Inside this context, also in threads started there, the first write gives up `timeout_s` seconds from now.

    A request may wait for more than the lock; with this it is still answered in time. Later writes of the request wait
    for their usual timeout, since part of the work is done.
    """
    token = _patience.set(_Patience(timeout_s))
    try:
        yield
    finally:
        _patience.reset(token)


@contextmanager
def hold_patiently(lock: WriteLock, timeout_s: float) -> Iterator[None]:
    """Hold the lock; DatabaseBusy when it did not come within `timeout_s` seconds, or when `patience` ended."""
    waiting = _patience.get()
    with lock.hold(timeout_s if waiting is None else waiting.left(timeout_s)):
        if waiting is not None:
            waiting.rewarded()
        yield


class TurnLock:
    """A mutual exclusion lock that is handed to waiting threads in the order of their arrival."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; False when it did not come within `timeout_s` seconds."""
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


class _BlockingRequest:
    """A thread that waits in flock(2); the lock belongs to the thread that wants it when it arrives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._guard = threading.Lock()
        self._arrived = threading.Event()
        self._wanted = True
        self._over = False
        threading.Thread(target=self._wait, name="write-lock", daemon=True).start()

    def _wait(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._guard:
            if self._wanted:
                self._arrived.set()
            else:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
                self._over = True

    def adopt(self) -> bool:
        """Wait again for a lock that an earlier waiter gave up; False when it has come and was released meanwhile."""
        with self._guard:
            self._wanted = True
            return not self._over

    def wait(self, timeout_s: float) -> bool:
        """Return True if the lock arrived within `timeout_s` seconds; if not, the waiter gives up."""
        if self._arrived.wait(timeout_s):
            return True
        with self._guard:
            self._wanted = self._arrived.is_set()
            return self._wanted


class WriteLock:
    """An exclusive lock on a file of its own.

    It must not be the database's file: closing any descriptor of that file would drop SQLite's own locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = TurnLock()
        self._request: _BlockingRequest | None = None
        self._descriptor: int | None = None

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock; DatabaseBusy when it did not come within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout_s):
            raise self._busy(timeout_s)
        try:
            descriptor = self._open()
            if not self._lock(descriptor, deadline):
                raise self._busy(timeout_s)
            try:
                yield
            finally:
                # Unlock explicitly: a process forked meanwhile may have a copy of the descriptor.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._turn.release()

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self._descriptor

    def _lock(self, descriptor: int, deadline: float) -> bool:
        if self._request is None or not self._request.adopt():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._request = _BlockingRequest(descriptor)
            else:
                self._request = None
                return True
        if not self._request.wait(max(0.0, deadline - time.monotonic())):
            return False
        self._request = None
        return True

    def _busy(self, timeout_s: float) -> DatabaseBusy:
        return DatabaseBusy(f"Another process has been writing for longer than {timeout_s:g} s ({self._path}).")

    def close(self) -> None:
        """Close the file, unless a helper thread still waits on it (the process's end closes it then)."""
        if self._descriptor is not None and self._request is None:
            os.close(self._descriptor)
            self._descriptor = None

    def forget(self) -> None:
        """In a forked child: close the copy of the descriptor, which would keep a dead parent's lock alive."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
