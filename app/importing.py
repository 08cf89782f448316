"""Starts programs with the right modules, and imports these faster. Standard library only, since the command line and
workers begin with it."""

import contextlib
import gc
import sys
from collections.abc import Iterator

from flopwatch.packages import START


def program(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our programs, `workers` or `app.cli`, with this interpreter, from any folder.

    In that process no module of a user's has the name of one of ours: see flopwatch/packages.py.
    """
    return [sys.executable, "-P", START, name, *arguments]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Import modules inside this context without the garbage collector, which also ignores their objects afterwards.

    The collector would scan all imported objects again and again and find nothing, which takes a tenth of a server's
    start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
