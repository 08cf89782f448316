"""Where a unit's process was when it died, or was ended.

It leaves that in files of its scratch folder: the step of the user's own, and its threads' stacks, which faulthandler
writes in a crash and at a signal of the keeper's, also where Python would run no handler. Ranks write their stacks to
their logs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path

from parallel.stacks import SIGNAL
from workers import uploaded
from workers.jobs._ranks import logs_in
from workers.measure import position
from workers.measure.position import Position

STACKS, POSITION = ".stacks", ".position"


def keep(scratch: Path) -> None:
    """Let this process leave its stacks and position in its scratch folder, if that has room for them. Its forks leave
    no stacks."""
    with contextlib.suppress(OSError):
        stacks = (scratch / STACKS).open("w")  # it stays open: faulthandler needs its descriptor
        faulthandler.enable(stacks)
        faulthandler.register(SIGNAL, stacks)
        position.keep(scratch / POSITION)
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    faulthandler.unregister(SIGNAL)
    faulthandler.enable(2)
    position.leave()


def position_in(scratch: Path) -> Position:
    """Return the position of a unit's process."""
    return position.read(scratch / POSITION)


def stacks_in(scratch: Path) -> str:
    """Return the stacks of a unit's process and the ends of its ranks' logs, as far as there are such."""
    own = _stacks(scratch)
    return (f"--- stacks of the job's process ---\n{own}\n" if own else "") + "".join(logs_in(scratch).values())


def place_in(scratch: Path) -> str:
    """Return the place in the user's code where a unit's process was, and where its ranks were: " (train.py:12, in
    step)"; "": there is none."""
    files = scratch / "code"
    ranks = ((f"rank {rank}: ", log) for rank, log in logs_in(scratch).items())
    return uploaded.places_in([("", _stacks(scratch)), *ranks], files)


def _stacks(scratch: Path) -> str:
    try:
        lines = (scratch / STACKS).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))
