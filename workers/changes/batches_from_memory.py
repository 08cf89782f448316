"""No waiting for input: loaders return their first batches again and again."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader

from workers.changes._base import LOADER_ANEW, Change, Look, own_only, replaced

KEPT = 2
"""Batches of a loader that are kept. The warm-up makes them."""


def _why_not(look: Look) -> str | None:
    if look.makes_loader:
        return LOADER_ANEW
    return None if look.loaders else own_only(look) or "the step reads no torch.utils.data.DataLoader"


def _length(loader: Any) -> int | None:
    """Return the number of a loader's batches, after which a loop over them ends; None if it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _from_memory(device: torch.device) -> AbstractContextManager[None]:
    plain: Any = DataLoader.__iter__
    kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def iterate(self: Any) -> Iterator[Any]:
        if self not in kept:
            # Pinned, as the cure's are: else the copies would take longer than with it.
            with replaced(self, "pin_memory", self.pin_memory or device.type == "cuda"):
                kept[self] = list(itertools.islice(plain(self), KEPT))
        return itertools.islice(itertools.cycle(kept[self]), _length(self))

    return replaced(DataLoader, "__iter__", iterate)


CHANGE = Change(
    causes=("input",),
    how="batches from memory: what a loader that is never late can bring",
    why_not=_why_not,
    before=_from_memory,
    removes=True,
)
