"""Folded stacks as a tree, for the flame graph that a browser draws. Frames too narrow to be seen are left out."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from app.web.plots.drawing import PALETTE, Figure, escaped

MIN_SHARE = 0.0005
"""Frames with a smaller share of the time are left out."""
MIN_DRAWN_SHARE = 0.002
"""The same in a picture, where nobody can widen a frame."""
FLAME_COLOURS = 8
MAX_FRAMES = 20_000
"""Largest number of frames that a browser gets: those with the most time."""
MAX_BYTES = 64 << 20
"""Largest number of bytes read of a file; the runner's own limit is lower."""
MAX_DEPTH = 100
"""Largest depth of a frame; deeper frames are counted as part of it."""


@dataclass
class Frame:
    """A frame with its callees. `time_us` includes their time."""

    name: str
    time_us: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)


def tree(stacks: bytes) -> list[Any]:
    """Return the tree of folded stacks, `frame;frame;frame µs` a line, as [name, µs, callees].

    The root is `all`, and the longest callees come first. A line that is no stack is left out.
    """
    root = Frame("all")
    for line in stacks.decode(errors="replace").splitlines():
        frames, _, time = line.rpartition(" ")
        if not frames or not (time.isascii() and time.isdigit()):
            continue
        root.time_us += int(time)
        at = root
        for name in frames.split(";")[:MAX_DEPTH]:
            at = at.callees.setdefault(name, Frame(name))
            at.time_us += int(time)
    return largest(root)


def draw_flames(root: list[Any]) -> Figure:
    """Draw such a tree: a row for each depth, each frame as wide as its share of the time and below its caller."""
    drawn = list(_placed(root, root[1] or 1))
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [one.depth for one in drawn],
        "x": [one.share for one in drawn],
        "base": [one.start for one in drawn],
        "width": 0.94,
        "text": [escaped(one.name) for one in drawn],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textangle": 0,
        "textfont": {"color": "var(--ground)"},
        "marker": {"color": [PALETTE[zlib.crc32(one.name.encode()) % FLAME_COLOURS] for one in drawn]},
        "customdata": [f"{escaped(one.name)}: {one.share:.2f} %" for one in drawn],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    layout = {
        "height": 90 + 18 * (max(one.depth for one in drawn) + 1),
        "xaxis": {"title": {"text": "Share of the time (%)"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "showticklabels": False, "showgrid": False, "zeroline": False},
        "showlegend": False,
        "uniformtext": {"minsize": 8, "mode": "hide"},
    }
    rows = [[one.depth, one.name, one.start, one.share] for one in drawn]
    table = {"columns": ["depth", "frame", "from (%)", "share (%)"], "rows": rows}
    return {"data": [trace], "layout": layout, "table": table, "empty": "Nothing was recorded."}


class _Placed(NamedTuple):
    """A frame of a picture, in percent of the whole."""

    name: str
    depth: int
    start: float
    share: float


def _placed(frame: list[Any], whole: float, depth: int = 0, start: float = 0.0) -> Iterator[_Placed]:
    """Yield a tree's frames, but for those that are too narrow."""
    name, time_us, callees = frame
    yield _Placed(name, depth, 100 * start / whole, 100 * time_us / whole)
    for callee in callees:
        if callee[1] >= MIN_DRAWN_SHARE * whole:
            yield from _placed(callee, whole, depth + 1, start)
        start += callee[1]


def largest(root: Frame) -> list[Any]:
    """Return the frames with the most time. No callee takes longer than its caller, so callers come before callees."""
    kept: list[Any] = [root.name, root.time_us, []]
    order = count()  # frames of the same time are not compared
    waiting = [(-root.time_us, next(order), root, kept)]
    for _ in range(MAX_FRAMES):
        if not waiting:
            break
        _, _, frame, shown = heapq.heappop(waiting)
        if frame is not root:
            own: list[Any] = [frame.name, frame.time_us, []]
            shown[2].append(own)
            shown = own
        for callee in frame.callees.values():
            if callee.time_us >= MIN_SHARE * root.time_us:
                heapq.heappush(waiting, (-callee.time_us, next(order), callee, shown))
    return kept
