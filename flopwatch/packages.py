"""Flopwatch's other packages under names that nobody else has: `flopwatch.kernels`, `flopwatch.parallel` for users, and
`flopwatch.app`, `flopwatch.migrations`, `flopwatch.workers` for our own programs.

A user's project, or his environment, may have a `kernels` or an `app`, too (Hugging Face's `kernels` is one). In the
repository our packages are `app`, `kernels`, …, and their sources import each other by these names. An installed
Flopwatch has them as folders of `flopwatch`; a checkout has them beside it, and this module finds them there. Imported
under its long name, a module of ours gets an `__import__` of its own, which knows `kernels` as `flopwatch.kernels`;
everybody else's finds what it always finds. (`kernels` imports by relative names only, and needs none.)

In a checkout the short names work, too. Whichever name of a package is imported first in a process, the other one gives
the same module objects: nothing of ours is ever imported twice. Standard library only.
"""

import builtins
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

OURS = "flopwatch"
PACKAGES = ("app", "kernels", "migrations", "parallel", "workers")
PUBLIC = ("kernels", "parallel")
RELATIVE = ("kernels",)
"""Packages that import by relative names only."""
HOME = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - `import flopwatch` is quicker without pathlib
IS_CHECKOUT = not os.path.isdir(os.path.join(HOME, "workers"))  # noqa: PTH112, PTH118
FOLDER = os.path.dirname(HOME) if IS_CHECKOUT else HOME  # noqa: PTH120
"""The folder of the packages."""
START = os.path.join(HOME, "start.py")  # noqa: PTH118
"""The script that starts our programs."""


class Finder:
    """Finds our packages by their long names, and makes both names of one the same."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of our modules; None for others."""
        top, _, rest = fullname.partition(".")
        package = rest.partition(".")[0] if top == OURS else top
        if package not in PACKAGES:
            return None
        if top != OURS:
            if not _is_imported_as(f"{OURS}.{package}"):
                return None
            found = PathFinder.find_spec(fullname, path, target)
            return _alias(fullname, f"{OURS}.{fullname}") if _is_in_folder(found) else None
        if _is_imported_as(package):
            return _alias(fullname, rest)
        found = PathFinder.find_spec(fullname, [FOLDER] if rest == package else path, target)
        if found is not None and package not in RELATIVE and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


class _Loader(SourceFileLoader):
    """Gives a module our `__import__`, which its functions keep."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Alias:
    """Gives a module that has another name, too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set that of the alias


def _alias(fullname: str, name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    return None if spec is None else ModuleSpec(fullname, _Alias(name), origin=spec.origin)  # type: ignore[arg-type]


def _import(
    name: str,
    scope: Mapping[str, object] | None = None,
    local: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Import as the statement in one of our modules says."""
    package = name.partition(".")[0]
    if level or package not in PACKAGES:
        return __import__(name, scope, local, fromlist, level)
    module = __import__(f"{OURS}.{name}", scope, local, fromlist)
    return module if fromlist else sys.modules[f"{OURS}.{package}"]


# The builtins as they are now. Those that a user's code replaces or adds later (`print` on rank 0 only, a profiler's
# `profile`) reach his modules and the libraries, not ours, which must not change what they measure or report for them.
# Only `__import__` is looked up at each import, since a hook there must see every module.
_BUILTINS = {**vars(builtins), "__import__": _import}


def _is_in_folder(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.origin is None:
        return False
    return os.path.realpath(spec.origin).startswith(os.path.join(FOLDER, ""))  # noqa: PTH118


def _is_imported_as(name: str) -> bool:
    """Return whether one of our packages has this name, and not as its other one."""
    module = sys.modules.get(name)
    return module is not None and module.__name__ == name and _is_in_folder(module.__spec__)


def hide() -> None:
    """Leave `flopwatch` as the only name of ours that this process imports: before code of others runs in it.

    A checkout may be on `sys.path`, as the current folder, by PYTHONPATH or by an installation; in its place comes a
    folder that has `flopwatch` alone.
    """
    for package in PACKAGES:
        if (module := sys.modules.get(package)) is not None and _is_in_folder(module.__spec__):
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                del sys.modules[name]
    sys.path[:] = without_checkout(sys.path)


def without_checkout(path: Sequence[str]) -> list[str]:
    """Return a search path with the folder that has `flopwatch` alone in place of the checkout's own."""
    if not IS_CHECKOUT:
        return list(path)
    exposing = os.path.join(FOLDER, "tools", "editable")  # noqa: PTH118
    return list(dict.fromkeys(exposing if os.path.realpath(entry) == FOLDER else entry for entry in path))


def cure(module: str, own: str) -> str | None:
    """Return what to do where a user's code finds no module that has the name of a package of ours; None for other
    modules. `own` says how one's own goes along. What pip installs by this name is most likely neither."""
    if module not in PACKAGES:
        return None
    ours = f"; if it is Flopwatch's, write {OURS}.{module}" if module in PUBLIC else ""
    return f"if {module!r} is yours, {own}{ours}; what pip installs by this name is another project's"


def use() -> None:
    """Let this process find our packages. `import flopwatch` does."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
