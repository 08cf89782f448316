"""Gives every process that has this folder on its path one more job kind, `staged`; the product knows nothing of it.

Python imports this module at start. The registries walk the folders of their packages: here each gets a second folder
at the moment it is imported, as if the files lay in the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
FOLDERS = {"app.specs": FOLDER / "specs", "workers.jobs": FOLDER / "jobs"}


class SecondFolder(MetaPathFinder):
    """Finds the packages where they are and adds a folder to each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FOLDERS:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.submodule_search_locations is not None
        found.submodule_search_locations.append(str(FOLDERS[fullname]))
        return found


sys.meta_path.insert(0, SecondFolder())

import light_warm_parent  # noqa: E402, F401 - it imports both packages
