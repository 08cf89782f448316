"""Gives the registries of job kinds a second folder, as if its files lay in the first; the product knows nothing of it.

The registries walk the folders of their packages. A `sitecustomize` calls `add` before it imports either package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def add(folder: Path) -> None:
    """Let the kinds in `folder`/specs and `folder`/jobs be found beside the product's."""
    sys.meta_path.insert(0, SecondFolder({"app.specs": folder / "specs", "workers.jobs": folder / "jobs"}))


class SecondFolder(MetaPathFinder):
    """Finds packages where they are and adds a folder to each."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._folders:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.submodule_search_locations is not None
        found.submodule_search_locations.append(str(self._folders[fullname]))
        return found
