"""The server's log, which a client cannot make grow without limit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.server.logs import BURST, WINDOW_S, RateLimit


def record(message: str = "%d bad requests", line: int = 1, error: Any = None) -> logging.LogRecord:
    return logging.LogRecord("a", logging.WARNING, "file.py", line, message, (7,), error)


def test_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("app.server.logs.time", SimpleNamespace(monotonic=lambda: now))
    limit = RateLimit()
    assert [limit.filter(record()) for _ in range(BURST + 5)] == [True] * BURST + [False] * 5
    assert limit.filter(record(line=2)), "another kind"
    now += WINDOW_S
    first = record()
    assert limit.filter(first)
    assert first.getMessage() == "7 bad requests [and 5 more of these in 60 s]"
    now += WINDOW_S
    second = record()
    assert limit.filter(second)
    assert second.getMessage() == "7 bad requests"


def test_errors_of_different_places_differ_in_kind() -> None:
    limit = RateLimit()

    def caught(work: Callable[[], object]) -> Any:
        try:
            work()
        except ZeroDivisionError:
            return sys.exc_info()
        raise AssertionError

    def here() -> object:
        return 1 / 0

    def there() -> object:
        return 1 // 0

    assert [limit.filter(record(error=caught(here))) for _ in range(BURST + 1)][-1] is False
    assert limit.filter(record(error=caught(there)))
