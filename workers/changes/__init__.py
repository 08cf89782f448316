"""The changes that a diagnosis applies to a step from outside, the user's files untouched: one file each.

A file holds CHANGE, a `Change` (workers/changes/_base.py). Other packages add theirs by entry points of the group
`flopwatch.changes`. Importing this package imports neither torch nor the changes.
"""

import pkgutil

from kernels.registry import Registry
from workers.changes._base import Change


def _check(_name: str, loaded: object) -> None:
    if not isinstance(loaded, Change):
        raise TypeError(f"expected a workers.changes.Change, not {type(loaded).__name__}")


CHANGES = Registry(
    "change",
    "flopwatch.changes",
    {one.name: f"{__name__}.{one.name}:CHANGE" for one in pkgutil.iter_modules(__path__) if one.name[0] != "_"},
    _check,
)
