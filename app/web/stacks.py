"""Folded stacks as a tree, for the flame graph that a browser draws. Frames too narrow to be seen are left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEAST_SHARE = 0.0005
"""Frames with a smaller share of the time are left out, as if they were the frame below."""
MOST_FRAMES = 20_000
"""Most frames that a browser is sent, those with the most time."""
MOST_BYTES = 64 << 20
"""Most of a file that is read; the runner's own limit is lower."""


@dataclass
class Frame:
    """A frame with its callees. `time_us` holds theirs."""

    name: str
    time_us: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)

    def public(self, least_us: float) -> list[Any]:
        """Return [name, µs, callees] with the frames that take at least so long; the largest callees come first."""
        callees = sorted(self.callees.values(), key=lambda frame: -frame.time_us)
        return [self.name, self.time_us, [one.public(least_us) for one in callees if one.time_us >= least_us]]


def tree(path: Path) -> list[Any]:
    """Return the tree of a file of folded stacks, `frame;frame;frame µs` a line, as [name, µs, callees].

    The root is `all`. A line that is no stack is left out.
    """
    root, depth_limit = Frame("all"), 400
    with path.open("rb") as file:
        text = file.read(MOST_BYTES).decode(errors="replace")
    for line in text.splitlines():
        frames, _, time = line.rpartition(" ")
        if not frames or not time.isdecimal():
            continue
        root.time_us += int(time)
        at = root
        for name in frames.split(";")[:depth_limit]:
            at = at.callees.setdefault(name, Frame(name))
            at.time_us += int(time)
    return root.public(least_time(root))


def least_time(root: Frame) -> float:
    """Return the least time in µs of a frame that is sent: a share of all, and more where there are too many frames."""
    times, waiting = list[int](), [root]
    while waiting:
        frame = waiting.pop()
        times.append(frame.time_us)
        waiting += frame.callees.values()
    least = LEAST_SHARE * root.time_us
    return least if len(times) <= MOST_FRAMES else max(least, sorted(times, reverse=True)[MOST_FRAMES])
