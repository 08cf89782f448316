"""Draws stacks as a flame graph (Gregg, 2016): an SVG that needs nothing else, without scripts.

A frame is as wide as its share of the time, and is drawn above its caller. Its tooltip has its whole name, its time and
its share.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from workers.measure.profiling.stacks import Stacks

WIDTH = 1200.0
ROW = 17.0
HEAD = 44.0
MARGIN = 10.0
MIN_WIDTH = 0.4
"""Frames that are narrower, in pixels, are not drawn."""
CHARACTER = 6.6
"""Width of a character in pixels."""
MAX_NAME = 300
KERNEL = re.compile(r"^(void|Memcpy|Memset|triton_)|kernel|gemm|nvjet")
CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold."""


@dataclass
class Frame:
    """A frame with its callees. `time_ns` includes their time."""

    name: str
    time_ns: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)


@dataclass(frozen=True)
class _Box:
    frame: Frame
    left: float
    width: float
    depth: int


def build(stacks: Stacks) -> Frame:
    """Return the tree of frames under one root, `all`."""
    root = Frame("all")
    for frames, time in stacks.items():
        root.time_ns += time
        at = root
        for name in frames:
            at = at.callees.setdefault(name, Frame(name))
            at.time_ns += time
    return root


def draw(stacks: Stacks, title: str, subtitle: str) -> str:
    root = build(stacks)
    boxes = list(_boxes(root))
    depth = max((box.depth for box in boxes), default=0)
    height = HEAD + (depth + 1) * ROW + MARGIN
    size = f'width="{WIDTH:g}" height="{height:g}" viewBox="0 0 {WIDTH:g} {height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="ui-monospace, monospace" font-size="11">',
        f"<title>{_text(title)}</title>",
        '<rect width="100%" height="100%" fill="#fffdf8"/>',
        f'<text x="{MARGIN:g}" y="18" font-size="14">{_text(title)}</text>',
        f'<text x="{MARGIN:g}" y="34" fill="#666">{_text(subtitle)}</text>',
    ]
    parts += [_rectangle(box, root.time_ns, height) for box in boxes]
    return "\n".join([*parts, "</svg>\n"])


def _boxes(root: Frame) -> Iterator[_Box]:
    if not root.time_ns:
        return
    scale = (WIDTH - 2 * MARGIN) / root.time_ns
    pending = [_Box(root, MARGIN, root.time_ns * scale, 0)]
    while pending:
        box = pending.pop()
        yield box
        left = box.left
        for callee in sorted(box.frame.callees.values(), key=lambda frame: frame.name):
            width = callee.time_ns * scale
            if width >= MIN_WIDTH:
                pending.append(_Box(callee, left, width, box.depth + 1))
            left += width


def _rectangle(box: _Box, total_ns: int, height: float) -> str:
    top = height - MARGIN - (box.depth + 1) * ROW
    share = 100 * box.frame.time_ns / total_ns
    tooltip = f"{box.frame.name[:MAX_NAME]}: {1e-6 * box.frame.time_ns:.3f} ms, {share:.2f} %"
    max_characters = int((box.width - 4) / CHARACTER)
    name = box.frame.name
    shown = name if len(name) <= max_characters else f"{name[: max_characters - 1]}…" if max_characters > 3 else ""
    label = f'<text x="{box.left + 2:.2f}" y="{top + 12:.2f}">{_text(shown)}</text>' if shown else ""
    return (
        f"<g><title>{_text(tooltip)}</title>"
        f'<rect x="{box.left:.2f}" y="{top:.2f}" width="{max(box.width - 0.3, 0.1):.2f}" height="{ROW - 1:g}" '
        f'rx="1" fill="{_colour(name)}"/>{label}</g>'
    )


def _colour(name: str) -> str:
    """Return a colour that depends on the name: warm for Python, blue for ranges and operators, green for kernels."""
    noise = zlib.crc32(name.encode(errors="replace"))
    if ".py(" in name or name.startswith(("<", "nn.Module")):
        hue, spread = 28, 24
    elif KERNEL.search(name):
        hue, spread = 100, 30
    else:
        hue, spread = 205, 20
    return f"hsl({hue + noise % spread}, {55 + (noise >> 8) % 20}%, {68 + (noise >> 16) % 12}%)"


def _text(text: str) -> str:
    return escape(CONTROL.sub("�", text), quote=True)
