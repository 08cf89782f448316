"""The server's log, which goes to standard error with a rate limit on records of one kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from app.text.characters import one_line, shown

FORMAT = "%(asctime)s %(levelname)s %(message)s"
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


class _Formatter(logging.Formatter):
    """Shows control characters, and keeps each message in one line: clients and jobs wrote parts of it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def set_up() -> None:
    """Log warnings and worse of everything in this process, uvicorn and asyncio included."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(FORMAT))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
