"""Checks that what a worker imports is installed, and is ours."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from workers.outcome import InvalidEnvironment

NEEDED = ("torch", "psutil", "pynvml")


def check_packages() -> None:
    """Refuse to run beside another distribution that has a package of the name of one of ours.

    PyPI's distribution `kernels` is one: installed into one environment, both write the same folder.

    Raises:
        InvalidEnvironment: the message names the package, the distribution and the folder.
    """
    home = Path(__file__).resolve().parent.parent
    distributions = metadata.packages_distributions()
    for name in ("app", "flopwatch", "kernels", "migrations", "parallel", "workers"):
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        others = [
            other
            for other in dict.fromkeys(distributions.get(name, ()))
            if other != "flopwatch" and Path(str(metadata.distribution(other).locate_file(name))).resolve() == folder
        ]
        if others:
            wrong = f"the distribution {others[0]!r} has a package {name!r}, too, and writes it to {folder}"
        elif folder != home / name:
            wrong = f"package {name!r} is imported from {folder}, not from {home}"
        else:
            continue
        raise InvalidEnvironment(f"{wrong}: install Flopwatch into an environment of its own")


def check_dependencies() -> None:
    """Refuse to run where only the server's dependencies are installed.

    Raises:
        InvalidEnvironment: a dependency is missing; the message names it, and the cure.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidEnvironment(f"a worker needs {', '.join(missing)}, too: install flopwatch[worker]")
