"""Writes a Chrome trace as compressed JSON, cut to a size.

The profiler writes one JSON object, whose `traceEvents` may take gigabytes. A trace that is too large is cut in time:
events that begin after the cut are dropped, the last steps first. Events without a time (names of threads) are kept.
The file is read piece by piece, because the process that cuts it still holds the model. Neither the host's name nor
its folders remain.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from workers.measure.paths import bytes_without_folders

LEVEL = 3
"""Compression level: nearly as good as level 9 for traces, in a tenth of the time."""
MARGIN = 0.9
"""Factor by which a cut is smaller than the estimate, since events compress differently."""
READ_BYTES = 1 << 20
"""Most bytes to read at once, unless one event is larger."""
ALWAYS = -math.inf
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_HOST = re.compile(rb'("host_name"\s*:\s*)"[^"]*"')
_FILE = re.compile(rb'("traceName"\s*:\s*")[^"]*/')
_OVERLAP = 1000
"""Most bytes of the text that `_EVENTS` matches, which two pieces may share."""
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
class _Events:
    """Offsets of the events in the file, and their begin times: numbers only, since there may be millions."""

    start: int
    """The offset behind the bracket that opens their list."""
    first: array[int] = field(default_factory=lambda: array("q"))
    last: array[int] = field(default_factory=lambda: array("q"))
    """The offset behind each event."""
    time_us: array[float] = field(default_factory=lambda: array("d"))
    """ALWAYS for an event without a time."""
    steps_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Duration and end of each step's range: of several with its name, the longest one encloses the others."""


def write(raw: Path, target: Path, max_bytes: int, steps: Sequence[str]) -> Kept:
    """Compress the profiler's trace to at most `max_bytes`, cut to fewer steps or, within the first one, fewer events.

    Args:
        raw: The trace as the profiler wrote it.
        target: The file to write, gzip.
        max_bytes: Largest size of that file.
        steps: Names of the ranges of the steps.

    Raises:
        TooSmall: even the first events do not fit; there is no file then.
        ValueError: `raw` is no trace.
    """
    with raw.open("rb") as source, gzip.open(target, "wb", compresslevel=LEVEL) as file:
        _copy(source, file.write)
    size, share = target.stat().st_size, 1.0
    if size <= max_bytes:
        return Kept(len(steps), 100.0)
    with raw.open("rb") as source:
        events = _index_events(source, frozenset(steps))
        times = array("d", sorted(time for time in events.time_us if time != ALWAYS))
        until = math.inf
        while size > max_bytes:
            share *= MARGIN * max_bytes / size
            former, until = until, times[int(share * (len(times) - 1))] if times else until
            until = max((end for _, end in events.steps_us.values() if end <= until), default=until)
            if until >= former:  # only the very first events are left
                target.unlink()
                raise TooSmall(f"{max_bytes} bytes hold nothing of the trace")
            share = bisect.bisect_right(times, until) / len(times)
            _write_part(source, events, until, target)
            size = target.stat().st_size
    return Kept(sum(end <= until for _, end in events.steps_us.values()), 100 * share)


def _write_part(source: BinaryIO, events: _Events, until_us: float, target: Path) -> None:
    """Write the text up to the first event, the events that begin until a time, and the text after the last event."""
    with gzip.open(target, "wb", compresslevel=LEVEL) as packed, io.BufferedWriter(packed, READ_BYTES) as file:
        source.seek(0)
        file.write(_without_host(source.read(events.start)))
        separator = b""
        for first, last, time_us in zip(events.first, events.last, events.time_us, strict=True):
            if time_us <= until_us:
                source.seek(first)
                file.write(separator + _without_host(source.read(last - first)))
                separator = b","
        source.seek(events.last[-1] if events.last else events.start)
        _copy(source, file.write)


def _copy(source: BinaryIO, write: Callable[[bytes], int]) -> None:
    while lines := source.readlines(READ_BYTES):
        write(_without_host(b"".join(lines)))


def _without_host(text: bytes) -> bytes:
    return bytes_without_folders(_FILE.sub(rb"\1", _HOST.sub(rb'\1""', text)))


def _index_events(source: BinaryIO, steps: frozenset[str]) -> _Events:
    """Index the events of a trace, reading it piece by piece.

    Raises:
        ValueError: the text is no trace.
    """
    events = _Events(_start(source))
    place, size = events.start, READ_BYTES
    while True:
        source.seek(place)
        piece = source.read(size)
        text, at = piece.decode("latin-1"), 0  # one character for each byte: offsets in the text are those in the file
        try:
            while not text.startswith("]", at := _BETWEEN.match(text, at).end()):  # type: ignore[union-attr]
                event, end = _DECODER.raw_decode(text, at)
                _add(events, event, place + at, place + end, steps)
                at = end
        except json.JSONDecodeError:  # the rest of the event may be in the next piece
            if len(piece) < size:
                raise
            place, size = place + at, READ_BYTES if at else 2 * size
        else:
            return events


def _add(events: _Events, event: dict[str, Any], first: int, last: int, steps: frozenset[str]) -> None:
    # Metadata events (names of threads and processes) have a time, too, but it is meaningless.
    time_us = None if event.get("ph") == "M" else event.get("ts")
    events.first.append(first)
    events.last.append(last)
    events.time_us.append(ALWAYS if time_us is None else time_us)
    if event.get("name") in steps and event.get("cat") == "user_annotation":
        found = event["dur"], event["ts"] + event["dur"]
        events.steps_us[event["name"]] = max(found, events.steps_us.get(event["name"], found))


def _start(source: BinaryIO) -> int:
    """Return the offset behind the bracket that opens the list of events."""
    text, before = b"", 0
    source.seek(0)
    while piece := source.read(READ_BYTES):
        text += piece
        if (match := _EVENTS.search(text)) is not None:
            return before + match.end()
        before += len(text) - len(text[-_OVERLAP:])
        text = text[-_OVERLAP:]
    raise ValueError("the profiler's file has no traceEvents")
