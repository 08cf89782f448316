"""How every process of the service writes its log: one line a record, for people or as JSON, with the ids of the job
and the attempt that it is about. Standard library only."""

import json
import logging
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from flopwatch.text.characters import in_json, one_line, shown

LogFormat = Literal["console", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

BURST = 10
WINDOW_S = 60.0
MAX_KINDS = 1000

_about: ContextVar[dict[str, int | str]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


def note_job(job: int, attempt: int | None = None) -> None:
    """Let what this thread or task logs from now on carry these ids, beside that of its request."""
    request = {"request": one} if (one := request_id()) is not None else {}
    _about.set(request | ({"job": job} if attempt is None else {"job": job, "attempt": attempt}))


def note_request(request: str) -> None:
    """Let what this task logs from now on carry the id of the request that it answers."""
    _about.set({**_about.get(), "request": request})


def request_id() -> str | None:
    """Return the id of the request that this thread or task answers; None if there is none."""
    found = _about.get().get("request")
    return None if found is None else str(found)


@contextmanager
def about(job: int, attempt: int | None = None) -> Iterator[None]:
    """Let what is logged inside carry these ids."""
    before = _about.set(_about.get())
    try:
        note_job(job, attempt)
        yield
    finally:
        _about.reset(before)


class ConsoleFormatter(logging.Formatter):
    """For people: time, level, `job=1 attempt=1` and the message, in one line.

    Shows control characters, since clients and jobs wrote parts of it; only a traceback has further lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        ids = "".join(f"{name}={value} " for name, value in _about.get().items())
        return one_line(f"{self.formatTime(record)} {record.levelname} {ids}{record.message}")

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


class JsonFormatter(logging.Formatter):
    """For programs: one JSON object a line. Times are UTC, RFC 3339. `extra={"fields": …}` adds members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **_about.get(),
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return in_json(json.dumps(line, ensure_ascii=False))


class RateLimit(logging.Filter):
    """Passes at most BURST warnings of one kind in WINDOW_S; the first one after that says how many were left out.

    Without it, a client could fill the disk, since every request can make the server log something, and so could a
    worker while its database is away.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True  # what jobs do: a job costs its client more than a line
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


def announce(message: str) -> None:
    """Print a line for people on standard output; if the log is JSON, as a line of it."""
    formatter = logging.root.handlers[0].formatter if logging.root.handlers else None
    if isinstance(formatter, JsonFormatter):
        message = formatter.format(logging.makeLogRecord({"name": __name__, "levelname": "INFO", "msg": message}))
    print(message, flush=True)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), trace)
    else:
        logging.getLogger(__name__).critical("uncaught: %s", error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if not issubclass(failed.exc_type, SystemExit):  # it ends the thread, and nothing is wrong
        _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Send the records of everything in this process to standard error, from `level` on, with a limit on warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of each plugin and each step
