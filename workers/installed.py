"""Checks that what a worker imports is installed."""

import importlib.util

from workers.outcome import InvalidEnvironment

NEEDED = ("torch", "psutil", "pynvml")


def check_dependencies() -> None:
    """Refuse to run where only the server's dependencies are installed. Raises InvalidEnvironment: a dependency is
    missing; the message names it, and the cure."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidEnvironment(f"a worker needs {', '.join(missing)}, too: install flopwatch[worker]")
