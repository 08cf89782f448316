"""Finds the line of code behind an allocation: the first frame of its stack that is not in torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TORCH = f"{Path(torch.__file__).parent}/"
LIBRARY = f"{sysconfig.get_path('stdlib')}/"
PACKAGES = "site-packages/"
SHOWN_PARTS = 3
"""Parts of a file's path that are shown."""
SHOWN_FRAMES = 5

Frame = Mapping[str, Any]


def outside_torch(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that are neither in torch nor in Python's own library, the innermost first."""
    return [frame for frame in frames if not _inside(frame["filename"])]


def _inside(filename: str) -> bool:
    if not filename.endswith(".py") or filename.startswith((TORCH, "torch/")) or "/torch/" in filename:
        return True  # C++, or code that torch compiled
    return filename.startswith(LIBRARY) and PACKAGES not in filename


def place(frame: Frame) -> str:
    """Return a frame as text: "model/transformer.py:68 forward"."""
    path = "/".join(Path(frame["filename"]).parts[-SHOWN_PARTS:])
    return f"{path}:{frame['line']} {frame['name']}"


def site(frames: Sequence[Frame]) -> str | None:
    """Return the innermost place outside torch; None where there is none, as on autograd's own threads."""
    return next((place(frame) for frame in outside_torch(frames)), None)


def short_stack(frames: Sequence[Frame]) -> str | None:
    """Return the innermost places outside torch, each called by the next."""
    return " < ".join(place(frame) for frame in outside_torch(frames)[:SHOWN_FRAMES]) or None
