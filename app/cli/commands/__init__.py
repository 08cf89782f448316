"""The commands: every module of this folder is imported, and registers its own with `common.command`."""

import importlib
import pkgutil
from typing import Any

from app.cli.common import cli

__all__ = ["cli"]

FIRST = ("processes", "jobs", "why", "queue", "results", "comparing", "doctor")
"""The order of modules in --help; others follow."""

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")


def _place(command: Any) -> int:
    name = command.callback.__module__.rpartition(".")[2]
    return FIRST.index(name) if name in FIRST else len(FIRST)


cli.registered_commands.sort(key=_place)
