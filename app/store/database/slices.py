"""Runs large changes in small transactions, so that other writers wait for a single one only."""

import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection

from app.store.database.engine import Database

SLICE_S = 0.02


class Slices:
    """Runs changes of many rows. After each transaction it pauses for as long as the transaction took, so that others
    can write.

    A change continues until it is done or until `stop` is called, for example when the server ends; committed slices
    stay. Threads may share it.

    slice_s: seconds after which a transaction takes no further step; pause: waits for so many seconds, or until the
    changes are stopped.
    """

    def __init__(
        self, database: Database, *, slice_s: float = SLICE_S, pause: Callable[[float], object] | None = None
    ) -> None:
        self.database = database
        self._slice_s = slice_s
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Let every change end after its present transaction, in whatever thread it runs."""
        self._stopped.set()

    def run(self, step: Callable[[Connection], int]) -> int:
        """Call `step` until it returns 0; returns the sum of what it returned.

        step: changes a few hundred rows at most, and returns their number.
        """
        total = 0
        while not self._stopped.is_set():
            with self.database.write() as connection:
                began = time.monotonic()
                while number := step(connection):
                    total += number
                    if time.monotonic() - began >= self._slice_s:
                        break
            if not number:
                break
            self._pause(time.monotonic() - began)
        return total
