"""No waiting for input: loaders return their first batches again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look, own_only

if TYPE_CHECKING:
    import torch

KEPT = 2
"""Batches that are kept. The warm-up makes them."""


def _why_not(look: Look) -> str | None:
    return None if look.loaders else own_only(look) or "the step reads no torch.utils.data.DataLoader"


@contextmanager
def _from_memory(_device: torch.device) -> Iterator[None]:
    from torch.utils.data import DataLoader

    plain: Any = DataLoader.__iter__

    def iterate(self: Any) -> Iterator[Any]:
        return itertools.cycle(list(itertools.islice(plain(self), KEPT)))

    DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]


CHANGE = Change(
    causes=("input",),
    how="batches from memory: what a loader that is never late can bring",
    why_not=_why_not,
    before=_from_memory,
    removes=True,
)
