"""Lines of the log, for people and for programs."""

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app import logs

logger = logging.getLogger("app.some.place")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[logs.LogFormat], io.StringIO]:
    """Set the log up, and return what is written."""

    def set_up(form: logs.LogFormat) -> io.StringIO:
        text = io.StringIO()
        monkeypatch.setattr("sys.stderr", text)
        logs.set_up("INFO", form)
        return text

    return set_up


def test_every_line_about_a_job_has_its_ids(written: Callable[[logs.LogFormat], io.StringIO]) -> None:
    text = written("json")
    logger.info("before")
    with logs.about(7, 2):
        logger.warning("slow: %s", "x\x1b[31m\ny")
        thread = threading.Thread(target=lambda: (logs.note_job(8, 1), logger.info("its own thread")))
        thread.start()
        thread.join()
        with logs.about(9):
            logger.info("inside")
        logger.info("again")
    logger.info("after")
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    ids = [(line.get("job"), line.get("attempt")) for line in lines]
    assert ids == [(None, None), (7, 2), (8, 1), (9, None), (7, 2), (None, None)]
    assert lines[1] | {"time": ""} == {
        "time": "",
        "level": "WARNING",
        "logger": "app.some.place",
        "job": 7,
        "attempt": 2,
        "message": "slow: x\x1b[31m\ny",
    }
    assert lines[1]["time"].endswith("+00:00")
    assert "\x1b" not in text.getvalue(), "what a job wrote cannot control a terminal"


def test_an_error_is_one_line_of_json(written: Callable[[logs.LogFormat], io.StringIO]) -> None:
    text = written("json")
    try:
        int("wrong")
    except ValueError:
        logger.exception("it failed")
    (line,) = text.getvalue().splitlines()
    assert json.loads(line)["exception"].endswith("base 10: 'wrong'")


def test_lines_for_people(written: Callable[[logs.LogFormat], io.StringIO]) -> None:
    text = written("console")
    with logs.about(7, 2):
        logger.warning("forged\n2026-01-01 INFO job=1 line")
    logger.info("plain")
    first, second = text.getvalue().splitlines()
    assert first.endswith(r" WARNING job=7 attempt=2 forged\n2026-01-01 INFO job=1 line")
    assert second.endswith(" INFO plain")


def warning(line: int = 1, error: Any = None) -> logging.LogRecord:
    return logging.LogRecord("a", logging.WARNING, "file.py", line, "%d bad requests", (7,), error)


def test_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("app.logs.time", SimpleNamespace(monotonic=lambda: now))
    limit = logs.RateLimit()
    assert [limit.filter(warning()) for _ in range(logs.BURST + 5)] == [True] * logs.BURST + [False] * 5
    assert limit.filter(warning(line=2)), "another kind"
    now += logs.WINDOW_S
    first = warning()
    assert limit.filter(first)
    assert first.getMessage() == "7 bad requests [and 5 more of these in 60 s]"
    now += logs.WINDOW_S
    second = warning()
    assert limit.filter(second)
    assert second.getMessage() == "7 bad requests"


def test_errors_of_different_places_differ_in_kind() -> None:
    limit = logs.RateLimit()

    def caught(work: Callable[[], object]) -> Any:
        try:
            work()
        except ZeroDivisionError:
            return sys.exc_info()
        raise AssertionError

    def here() -> object:
        return 1 / 0

    assert [limit.filter(warning(error=caught(here))) for _ in range(logs.BURST + 1)][-1] is False
    assert limit.filter(warning(error=caught(lambda: 1 // 0)))


def test_a_process_warns_of_one_thing_a_few_times_only(written: Callable[[logs.LogFormat], io.StringIO]) -> None:
    text = written("console")
    for _ in range(2 * logs.BURST):
        logger.warning("the store cannot be written now")
        logger.info("a job ended")
    assert text.getvalue().count("the store cannot be written now") == logs.BURST
    assert text.getvalue().count("a job ended") == 2 * logs.BURST
