"""Writes a Chrome trace as compressed JSON, cut to a size.

The profiler writes one JSON object, whose `traceEvents` may take gigabytes. A trace that is too large is cut in time:
events that begin after the cut are removed, those of the last steps first. Events without a time (names of threads)
stay.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEVEL = 3
"""Compression level: nearly as good as level 9 for traces, in a tenth of the time."""
MARGIN = 0.9
"""Factor by which a cut is smaller than the estimate, since events compress differently."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder(strict=False)


class TooSmall(Exception):
    """Not even the first events fit into the size."""


@dataclass(frozen=True)
class Kept:
    """The part of a trace that was kept."""

    steps: int
    """Number of whole steps."""
    percent: float
    """Percentage of the events that were kept; 100 for a whole trace."""


@dataclass(frozen=True)
class _Event:
    """An event's place in the text, and its beginning; None if it has no time."""

    first: int
    last: int
    time_us: float | None
    step_end_us: float | None
    """End of the step, if the event is the range of a step."""


def write(raw: Path, target: Path, max_bytes: int, steps: Sequence[str]) -> Kept:
    """Compress the profiler's trace to at most `max_bytes`, cut to fewer steps or, within the first one, fewer events.

    Args:
        raw: The trace as the profiler wrote it.
        target: The file to write, gzip.
        max_bytes: Most bytes of that.
        steps: Names of the ranges of the steps.

    Raises:
        TooSmall: even the first events are too large; there is no file then.
        ValueError: the file is no trace.
    """
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=LEVEL) as file:
        shutil.copyfileobj(source, file, 1 << 20)
    size, share = target.stat().st_size, 1.0
    if size <= max_bytes:
        return Kept(len(steps), 100.0)
    text = raw.read_text(encoding="utf-8", errors="replace")
    start, events = _events(text, frozenset(steps))
    times = sorted(event.time_us for event in events if event.time_us is not None)
    ends = sorted(event.step_end_us for event in events if event.step_end_us is not None)
    until = math.inf
    while size > max_bytes:
        share *= MARGIN * max_bytes / size
        former, until = until, times[int(share * (len(times) - 1))] if times else until
        until = max((end for end in ends if end <= until), default=until)
        if until >= former:  # only the very first events are left
            target.unlink()
            raise TooSmall(f"{max_bytes} bytes hold nothing of the trace")
        share = bisect.bisect_right(times, until) / len(times)
        _write_part(text, start, events, until, target)
        size = target.stat().st_size
    return Kept(sum(end <= until for end in ends), 100 * share)


def _write_part(text: str, start: int, events: Sequence[_Event], until_us: float, target: Path) -> None:
    """Write the text up to the first event, the events that begin until a time, and the text after the last event."""
    with gzip.open(target, "wt", compresslevel=LEVEL, encoding="utf-8") as file:
        file.write(text[:start])
        separator = ""
        for event in events:
            if event.time_us is None or event.time_us <= until_us:
                file.write(separator + text[event.first : event.last])
                separator = ","
        file.write(text[events[-1].last :] if events else text[start:])


def _events(text: str, steps: frozenset[str]) -> tuple[int, list[_Event]]:
    """Return where the events begin, and the events.

    Raises:
        ValueError: the text is no trace.
    """
    found = _EVENTS.search(text)
    if found is None:
        raise ValueError("the profiler's file has no traceEvents")
    place, events = found.end(), list[_Event]()
    while True:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("]", place):
            return found.end(), events
        event, end = _DECODER.raw_decode(text, place)
        # Names of threads and processes have a time, too, which means nothing.
        time = None if event.get("ph") == "M" else event.get("ts")
        is_step = event.get("name") in steps and event.get("cat") == "user_annotation"
        events.append(_Event(place, end, time, event["ts"] + event["dur"] if is_step else None))
        place = end
