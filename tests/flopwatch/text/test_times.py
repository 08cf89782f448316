"""Times and time spans as people read and write them."""

from datetime import UTC, datetime, timedelta

import pytest

from flopwatch.text import times
from flopwatch.text.times import age, duration, moment, moment_of, ran


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"), (0.0004, "0 ms"), (0.85, "850 ms"), (0.9996, "1.0 s"), (4.21, "4.2 s"), (9.96, "10 s"),
        (59.4, "59 s"), (60, "1 min"), (192, "3 min 12 s"), (3600, "1 h"),
        (18_600, "5 h 10 min"), (86_400 * 12 + 3 * 3600, "12 d 3 h"),
    ],
)  # fmt: skip
def test_time_spans(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (150, "2 min"), (7300, "2 h"), (2e5, "2 d")])
def test_ages(seconds: int, text: str) -> None:
    now = datetime(2026, 3, 1, 14, 5, 9, tzinfo=UTC)
    assert age((now - timedelta(seconds=seconds)).isoformat(), now) == f"{text} ago"


def test_how_long_a_job_ran() -> None:
    began, ended = "2026-03-01T14:05:09.000001Z", "2026-03-01T14:05:10.500001Z"
    assert ran({"started_at": None, "finished_at": None}) is None
    assert ran({"started_at": began, "finished_at": ended}) == "1.5 s"
    assert ran({"started_at": began, "finished_at": None}, datetime(2026, 3, 1, 15, 5, 9, 1, UTC)) == "1 h"
    assert moment(began) == "2026-03-01 14:05:09 UTC"
    assert (moment(None), age(None)) == (None, None)


NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90min", datetime(2026, 3, 10, 10, 30, tzinfo=UTC)),
        ("7d", datetime(2026, 3, 3, 12, tzinfo=UTC)),
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T14:00:00+02:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
    ],
)
def test_moments_as_people_name_them(text: str, moment: datetime) -> None:
    assert moment_of(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "7", "d", "yesterday", "7y", "-7d", "2026-13-01", "999999999w"])
def test_a_malformed_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|year 1"):
        moment_of(text, NOW)


@pytest.mark.parametrize(("ahead_s", "shown"), [(300, "5 min ago"), (-300, "0 s ago"), (2, "0 s ago")])
def test_ages_go_by_the_servers_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float, shown: str) -> None:
    monkeypatch.setattr(times, "_ahead", timedelta())
    own = datetime.now(UTC)
    times.set_clock(own + timedelta(seconds=ahead_s), 3.0)
    assert age(own.isoformat()) == shown
    times.set_clock(own)
    assert age((own - timedelta(seconds=65)).isoformat()) == "1 min ago"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (31.4, "31 s"), (2400, "40 min"), (7199, "120 min"), (10_000, "3 h"), (2e5, "2 d")],
)
def test_a_guessed_time_has_one_unit(seconds: float, text: str) -> None:
    assert times.rough_duration(seconds) == text
