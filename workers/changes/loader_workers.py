"""Batches made by worker processes, ahead of the step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look, own_only

if TYPE_CHECKING:
    import torch

MOST = 4


def workers() -> int:
    """Return how many processes a loader gets: at most one for each core."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def _why_not(look: Look) -> str | None:
    if not look.loaders:
        return own_only(look) or "the step reads no torch.utils.data.DataLoader"
    if all(look.loaders):
        return "its loaders have worker processes already"
    return None


@contextmanager
def _with_workers(device: torch.device) -> Iterator[None]:
    from torch.utils.data import DataLoader

    plain: Any = DataLoader.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) < 6 and not options.get("num_workers"):  # the sixth is num_workers
            options |= {"num_workers": workers(), "persistent_workers": True}
            options.setdefault("pin_memory", device.type == "cuda")
        plain(self, *arguments, **options)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__init__ = plain  # type: ignore[method-assign]


CHANGE = Change(
    causes=("input",),
    how="DataLoader(…, num_workers=N, persistent_workers=True), N up to the number of cores; on a GPU pin_memory=True",
    why_not=_why_not,
    before=_with_workers,
)
