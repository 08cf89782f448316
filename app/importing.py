"""How a program imports what it runs. Standard library only: the command line and workers begin with it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Import modules without the garbage collector; it also leaves them alone afterwards.

    It would look through all that was imported again and again, and find nothing: that is a tenth of a server's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
