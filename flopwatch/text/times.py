"""Writes and parses times and time spans, for pages, the command line and the client. Standard library only."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

_ahead = timedelta()


def current_time() -> datetime:
    """Return the time by the clock of the database, as far as this process knows it; else by its own."""
    return datetime.now(UTC) + _ahead


def set_clock(theirs: datetime, resolution_s: float = 0.0) -> None:
    """Let `current_time` go by the clock that shows `theirs` now; a difference up to `resolution_s` is none."""
    global _ahead
    ahead = theirs - datetime.now(UTC)
    _ahead = ahead if abs(ahead.total_seconds()) > resolution_s else timedelta()


def duration(seconds: float) -> str:
    """Write a time span with the two units that matter: "850 ms", "4.2 s", "3 min 12 s", "5 h 10 min", "12 d 3 h"."""
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def rough_duration(seconds: float) -> str:
    """Write a guessed time span in one unit: "30 s", "40 min", "3 h", "2 d"."""
    for size, unit, least in ((86_400, "d", 2.0), (3600, "h", 2.0), (60, "min", 1.0)):
        if seconds >= least * size:
            return f"{round(seconds / size)} {unit}"
    return f"{round(max(seconds, 0))} s"


def parsed_time(text: str) -> datetime:
    """Parse a time that the server wrote."""
    return datetime.fromisoformat(text)


_SPANS = {"min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def moment_of(text: str, now: datetime | None = None) -> datetime:
    """Parse a time: a span before now ("90min", "12h", "7d", "2w"), a date, or an RFC 3339 time.

    A date stands for its first moment; a time without a time zone is UTC.

    Raises:
        ValueError: the text is none of these, or the time is before the year 1.
    """
    if span := re.fullmatch(r"(\d{1,9})(min|m|h|d|w)", text.strip(), re.ASCII):
        try:
            return (now or current_time()) - timedelta(seconds=int(span[1]) * _SPANS[span[2]])
        except OverflowError:
            raise ValueError("is before the year 1") from None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("must be a span such as 90min, 12h, 7d or 2w, a date such as 2026-03-01, or a time") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def age(text: str | None, now: datetime | None = None) -> str | None:
    """Write how long ago a time of the server was, in its largest unit: "5 s ago", "3 min ago", "12 d ago".

    A time that cannot be read is None, and so is its age.
    """
    if text is None:
        return None
    seconds = ((now or current_time()) - parsed_time(text)).total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(int(seconds), 0)} s ago"


def ran(job: Mapping[str, Any], now: datetime | None = None) -> str | None:
    """Write how long a job ran, or has been running for; None if it never started."""
    if job["started_at"] is None:
        return None
    end = (now or current_time()) if job["finished_at"] is None else parsed_time(job["finished_at"])
    return duration((end - parsed_time(job["started_at"])).total_seconds())


def moment(text: str | None) -> str | None:
    """Write a time of the server to the second, in UTC: "2026-03-01 14:05:09 UTC"; None if there is none."""
    return None if text is None else f"{parsed_time(text):%Y-%m-%d %H:%M:%S} UTC"
