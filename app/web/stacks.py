"""Flame graphs of folded stacks. Frames too narrow to be seen are left out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.results.matching import amount, signed
from app.web.plots.drawing import PALETTE, Figure, escaped

MIN_SHARE = 0.002
"""Frames with a smaller share of the time are left out."""
FLAME_COLOURS = 8
LESS_OR_MORE = [[0, PALETTE[0]], [0.5, "var(--quiet)"], [1, "var(--bad)"]]
"""The colours of time that one side alone spends, the baseline or the candidate, and between them of equal times."""
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


def tree(stacks: bytes) -> Frame:
    """Return the tree of folded stacks, `frame;frame;frame µs` a line, below a root `all`; a line that is no stack is
    left out."""
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
    return root


def draw_flames(root: Frame) -> Figure:
    """Draw a tree: a row for each depth, each frame as wide as its share of the time and below its caller."""
    drawn = list(_placed(root, root.time_us or 1))
    texts = [f"{escaped(one.name)}: {one.share:.2f} %" for one in drawn]
    return _flames(drawn, texts, {"color": [PALETTE[zlib.crc32(one.name.encode()) % FLAME_COLOURS] for one in drawn]})


def draw_changed_flames(work: Iterable[tuple[Sequence[str], float, float]], unit: str) -> Figure:
    """Draw what two sides spent: each frame as wide as the larger side's share, red where the candidate spends more,
    blue where it spends less, the paler the less it differs. `work`: of each row its frames, the outermost first, and
    what baseline and candidate spent, in `unit`."""
    root, sides = Frame("all"), dict[tuple[str, ...], list[float]]()
    for frames, *both in work:
        for depth in range(len(frames) + 1):
            of_frame = sides.setdefault(tuple(frames[:depth]), [0.0, 0.0])
            of_frame[0] += both[0]
            of_frame[1] += both[1]
        at, time_us = root, round(1e3 * max(both))
        root.time_us += time_us
        for name in frames:
            at = at.callees.setdefault(name, Frame(name))
            at.time_us += time_us
    drawn = list(_placed(root, root.time_us or 1))
    texts, changes = [], []
    for one in drawn:
        baseline, candidate = sides.get(one.path, (0.0, 0.0))
        change = candidate - baseline
        texts.append(f"{escaped(one.name)}: {amount(baseline)} → {amount(candidate)} {unit} ({signed(change, unit)})")
        changes.append(change / (max(baseline, candidate) or 1.0))
    return _flames(drawn, texts, {"color": changes, "cmin": -1, "cmax": 1, "colorscale": LESS_OR_MORE}, "Share (%)")


@dataclass(frozen=True)
class _Placed:
    """A frame of a picture, in percent of the whole."""

    name: str
    path: tuple[str, ...]
    """The names of the frames around it and its own, without the root."""
    start: float
    share: float


def _placed(frame: Frame, whole: float, path: tuple[str, ...] = (), start: float = 0.0) -> Iterator[_Placed]:
    """Yield a tree's frames, the longest callees first, but for those that are too narrow."""
    yield _Placed(frame.name, path, 100 * start / whole, 100 * frame.time_us / whole)
    for callee in sorted(frame.callees.values(), key=lambda callee: -callee.time_us):
        if callee.time_us >= MIN_SHARE * whole:
            yield from _placed(callee, whole, (*path, callee.name), start)
        start += callee.time_us


def _flames(
    drawn: Sequence[_Placed], texts: Sequence[str], marker: Mapping[str, Any], share: str = "Share of the time (%)"
) -> Figure:
    depth = [len(one.path) for one in drawn]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": depth,
        "x": [one.share for one in drawn],
        "base": [one.start for one in drawn],
        "width": 0.94,
        "text": [escaped(one.name) for one in drawn],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textangle": 0,
        "textfont": {"color": "var(--ground)"},
        "marker": dict(marker),
        "customdata": list(texts),
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    layout = {
        "height": 90 + 18 * (max(depth) + 1),
        "xaxis": {"title": {"text": share}, "range": [0, 100]},
        "yaxis": {
            "autorange": "reversed",
            "fixedrange": True,
            "showticklabels": False,
            "showgrid": False,
            "zeroline": False,
        },
        "showlegend": False,
        "uniformtext": {"minsize": 8, "mode": "hide"},
    }
    rows = [[len(one.path), one.name, one.start, one.share] for one in drawn]
    table = {"columns": ["depth", "frame", "from (%)", "share (%)"], "rows": rows}
    return {"data": [trace], "layout": layout, "table": table, "empty": "Nothing was recorded."}
