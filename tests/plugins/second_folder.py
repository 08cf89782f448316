"""Gives the registries of job kinds further folders, as if their files lay in the first; unknown to the product.

The registries walk the folders of their packages. A `sitecustomize` calls `add` before it imports either package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def add(folder: Path) -> None:
    """Let the kinds in `folder`/specs and `folder`/jobs be found beside the product's, and those of earlier calls."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, FurtherFolders)]
    if not ours:
        ours = [FurtherFolders()]
        sys.meta_path.insert(0, ours[0])
    ours[0].folders.append(folder)


class FurtherFolders(MetaPathFinder):
    """Finds the two packages where they are and adds folders to each."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = {"app.specs": "specs", "workers.jobs": "jobs"}
        if fullname not in names:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.submodule_search_locations is not None
        found.submodule_search_locations += [str(folder / names[fullname]) for folder in self.folders]
        return found
