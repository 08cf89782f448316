"""Finds the line of code behind an allocation: the first frame of its stack that is not in torch."""

import linecache
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workers.measure.paths import without_folders

TORCH = f"{Path(torch.__file__).parent}/"
LIBRARY = f"{sysconfig.get_path('stdlib')}/"
PACKAGES = "site-packages/"
SHOWN_PARTS = 3
"""Parts of a file's path that are shown."""
SHOWN_FRAMES = 5
MAX_CODE = 100
"""Characters of a line of code that are kept."""
NEXT = " ← "
"""Between the lines of code of a stack."""
UPLOAD = re.compile(r"^[0-9a-f]{8}/")
"""The folder of an uploaded file, named by its content (workers.uploaded): two versions have the same places."""
DRIVERS = ("workers/jobs/memory/recording.py", "workers/measure/timing.py", "workers/measure/own_step.py")
"""Files whose functions run the steps and make the model."""

Frame = Mapping[str, Any]


def outside_torch(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that are neither in torch nor in Python's own library, the innermost first."""
    return [frame for frame in frames if not _inside(frame["filename"])]


def _inside(filename: str) -> bool:
    if not filename.endswith(".py") or filename.startswith((TORCH, "torch/")) or "/torch/" in filename:
        return True  # C++, or code that torch compiled
    return filename.startswith(LIBRARY) and PACKAGES not in filename


def from_the_step_on(frames: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return a stack, the innermost frame first, without the frames around the step, which are the worker's. `frames`:
    with file names without the host's folders."""
    around = next((index for index, frame in enumerate(frames) if frame["filename"] in DRIVERS), len(frames))
    return frames[: max(1, around)]


def place(frame: Frame) -> str:
    """Return a frame as text: "model/transformer.py:68 forward"."""
    path = "/".join(Path(UPLOAD.sub("", without_folders(frame["filename"]))).parts[-SHOWN_PARTS:])
    return f"{path}:{frame['line']} {frame['name']}"


def site(frames: Sequence[Frame]) -> str | None:
    """Return the innermost place outside torch; None where there is none, as on autograd's own threads."""
    return next((place(frame) for frame in outside_torch(frames)), None)


def _shown(frames: Sequence[Frame]) -> Sequence[Frame]:
    outside = outside_torch(frames)
    around = (at for at, frame in enumerate(outside) if without_folders(frame["filename"]) in DRIVERS)
    return outside[: max(1, next(around, SHOWN_FRAMES))][:SHOWN_FRAMES]


def short_stack(frames: Sequence[Frame]) -> str | None:
    """Return the innermost places of the step outside torch, each called by the next."""
    return " < ".join(place(frame) for frame in _shown(frames)) or None


def code(frames: Sequence[Frame]) -> str | None:
    """Return the lines' text of `short_stack`, which stays the same where lines move; None where it is unknown."""
    lines = [_line(frame) for frame in _shown(frames)]
    return NEXT.join(lines) if any(lines) else None


def is_call(frames: Sequence[Frame]) -> bool:
    """Return True if the place is the beginning of a function, as stacks of a CPU have it, and not a line of it."""
    return (code(frames) or "").startswith(("def ", "async def ", "@"))


def _line(frame: Frame) -> str:
    # Torch's profiler leaves the folders of sys.path out, and uploaded code is in the cache only.
    name = frame["filename"]
    known = next((full for folder in sys.path if (full := f"{folder}/{name}") in linecache.cache), name)
    return linecache.getline(known, frame["line"]).strip()[:MAX_CODE]
