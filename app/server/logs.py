"""The server's log, which goes to standard error with a rate limit on records of one kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from app import logs
from app.store.queue import ends

BURST = 10
WINDOW_S = 60.0
MAX_KINDS = 1000


class RateLimit(logging.Filter):
    """Passes at most BURST records of one kind in WINDOW_S; the first one after that says how many were left out.

    Without it, a client could fill the disk, since every request can make the server log something.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ends.logger.name:
            return True  # a job costs its client more than a line
        now, kind = time.monotonic(), _kind(record)
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= WINDOW_S:
            if count > BURST:
                record.msg = f"{record.getMessage()} [and {count - BURST} more of these in {now - began:.0f} s]"
                record.args = None
            began, count = now, 0
        if len(self._seen) >= MAX_KINDS and kind not in self._seen:
            self._seen.clear()
        self._seen[kind] = (began, count + 1)
        return count < BURST


def _kind(record: logging.LogRecord) -> Hashable:
    """Return the kind of a record: the place that logged it, and the place that raised its error."""
    error, place = None, None
    if record.exc_info:
        error, _, trace = record.exc_info
        while trace is not None:
            place, trace = (trace.tb_frame.f_code.co_filename, trace.tb_lineno), trace.tb_next
    return record.name, record.pathname, record.lineno, error, place


def set_up(form: logs.LogFormat) -> None:
    """Log the ends of jobs, and warnings and worse of everything in this process, uvicorn and asyncio included."""
    logs.set_up("WARNING", form, RateLimit())
    ends.logger.setLevel(logging.INFO)
