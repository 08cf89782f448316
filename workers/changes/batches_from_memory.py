"""No waiting for input: loaders return their first batches again and again."""

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory

from workers.changes._base import LOADER_ANEW, Change, Look, own_only, replaced
from workers.measure.allocations.categories import parts_of
from workers.outcome import Unsupported

KEPT = 2
"""Batches of a loader that are kept. The warm-up makes them."""
ALIKE = 1.05
"""By what factor their sizes may differ: some of them would tell little of batches of several lengths."""


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


def _parts(batch: Any) -> Iterator[Any]:
    """Yield the tensors and all else of which a batch consists, also in objects such as BatchEncoding or a graph."""
    rest, seen = [batch], set[int]()
    while rest:
        one = rest.pop()
        if isinstance(one, torch.Tensor):  # a sparse one has no nbytes
            yield from parts_of(one)
        elif not (inside := gc.get_referents(one)) or hasattr(one, "nbytes"):
            yield one
        elif not isinstance(one, type | ModuleType | FunctionType | torch.nn.Module) and id(one) not in seen:
            seen.add(id(one))
            rest += inside


def _size(batch: Any) -> int:
    return sum(getattr(one, "nbytes", 1) for one in _parts(batch))


def _again(batch: Any) -> Any:
    """Return a batch with the same tensors, in containers of its own: a step may put copies on the GPU there."""
    return tree_map(lambda one: one if isinstance(one, torch.Tensor) else copy.copy(one), batch)


def _from_memory(device: torch.device) -> AbstractContextManager[None]:
    plain: Any = DataLoader.__iter__
    kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def iterate(self: Any) -> Iterator[Any]:
        if self not in kept:
            kept[self] = list(itertools.islice(plain(self), KEPT))
            # Pinned, as the cure's are: else the copies would take longer than with it.
            if device.type == "cuda" and not any(getattr(one, "is_cuda", False) for one in _parts(kept[self])):
                kept[self] = pin_memory.pin_memory(kept[self])  # type: ignore[no-untyped-call]
            sizes = [_size(batch) for batch in kept[self]]
            if len(sizes) != _length(self) and max(sizes, default=0) > ALIKE * min(sizes, default=0):
                raise Unsupported("batches of its loader differ in size: the first ones are not like the others")
        return map(_again, itertools.islice(itertools.cycle(kept[self]), _length(self)))

    return replaced(DataLoader, "__iter__", iterate)


CHANGE = Change(
    causes=("input",),
    how="batches from memory: what a loader that is never late can bring",
    why_not=_why_not,
    before=_from_memory,
    removes=True,
)
