"""Gives the registries of job kinds further folders, as if their files lay in the first; unknown to the product.

The registries walk the folders of their packages. A `sitecustomize` calls `add` before it imports either package.
Programs of ours import both by long names (flopwatch/packages.py); what plugins import by short ones is then the same.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from flopwatch.packages import PACKAGES, START


def add(folder: Path) -> None:
    """Let the kinds in `folder`/specs and `folder`/jobs be found beside the product's, and those of earlier calls."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, FurtherFolders)]
    if not ours:
        ours = [FurtherFolders()]
        sys.meta_path.insert(0, ours[0])
    ours[0].folders.append(folder)
    if START in sys.orig_argv:
        use_long_names()


def use_long_names() -> None:
    """Import our packages as the product's own programs do."""
    for package in PACKAGES:
        importlib.import_module(f"flopwatch.{package}")


class FurtherFolders(MetaPathFinder):
    """Finds the two packages where they are and adds folders to each."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = {"app.specs": "specs", "workers.jobs": "jobs"}
        name = names.get(fullname.removeprefix("flopwatch."))
        if name is None:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next(spec for spec in others if spec is not None)
        if found.submodule_search_locations is not None:  # else it is another name of the same module
            found.submodule_search_locations += [str(folder / name) for folder in self.folders]
        return found
