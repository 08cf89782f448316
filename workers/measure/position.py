"""Which step of the user's own this process is in, also after the process has died: kept in memory that it shares with
a file."""

import mmap
from dataclasses import dataclass
from pathlib import Path

from kernels.clock import now_s

SIZE = 24
_cells = memoryview(bytearray(SIZE)).cast("d")
"""The number of the step, 1 inside of it, and when it began."""


@dataclass(frozen=True)
class Position:
    """The step in which a process is, or which it did last."""

    step: int
    """Counted from 1; 0: none has begun."""
    inside: bool
    began_s: float
    """When it began, by `now_s`, which all processes share."""

    def __str__(self) -> str:
        return f"{'in' if self.inside else 'after'} step {self.step}" if self.step else ""


def keep(file: Path) -> None:
    global _cells
    file.write_bytes(bytes(SIZE))
    with file.open("r+b") as opened:
        _cells = memoryview(mmap.mmap(opened.fileno(), SIZE)).cast("d")


def leave() -> None:
    """Keep the position of this process, a fork, for itself from now on: the file has that of its parent."""
    global _cells
    _cells = memoryview(bytearray(_cells)).cast("d")


def step_begins(number: int) -> None:
    _cells[0], _cells[1], _cells[2] = number, 1, now_s()


def step_ends() -> None:
    _cells[1] = 0


def here() -> Position:
    return _position(_cells)


def read(file: Path) -> Position:
    """Return the position that a process has kept in a file; before any step if it has kept none, or not all of it."""
    try:
        kept = file.read_bytes()
    except OSError:
        kept = b""
    cells = memoryview(kept.ljust(SIZE, b"\0")[:SIZE]).cast("d")
    # The user's code may write to the file, too: what is no number, or no time, is no position.
    return _position(cells) if 0 <= cells[0] < 1 << 53 and 0 <= cells[2] < 1 << 32 else Position(0, False, 0.0)


def _position(cells: "memoryview[float]") -> Position:
    return Position(int(cells[0]), bool(cells[1]), cells[2])
