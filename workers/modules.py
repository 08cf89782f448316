"""The Python modules that uploaded code can import in this worker's units."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import sys

from flopwatch.packages import without_checkout

MOST = 5000
"""Most names that a worker tells: about 50 kB."""


def importable() -> list[str] | None:
    """Return the names of all top-level modules, sorted, those of the standard library too; None if there are more than
    MOST, since a list with gaps would have code refused that runs.

    Folders of sys.path have what lies in them as files, installed distributions what they say: some are found in other
    ways (namespace packages, editable installs).
    """
    names = {
        *(module.name for module in pkgutil.iter_modules(without_checkout(sys.path))),
        *importlib.metadata.packages_distributions(),
        *sys.stdlib_module_names,
        *sys.builtin_module_names,
    }
    plain = sorted(name for name in names if name.isidentifier())
    return plain if len(plain) <= MOST else None
