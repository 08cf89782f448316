"""Starts programs with the right modules, and imports these faster. Standard library only, since the command line and
workers begin with it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
"""The folder of our packages."""


def program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with this interpreter.

    Python looks first in the current folder, which may be a project with modules of our names; only where we are not
    installed, that folder is ours.
    """
    safe = [] if HOME.samefile(os.curdir) else ["-P"]
    return [sys.executable, *safe, "-m", module, *arguments]


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
