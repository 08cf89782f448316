"""Batches made by worker processes, ahead of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look, own_only

if TYPE_CHECKING:
    import torch

WORKERS = 4


def _why_not(look: Look) -> str | None:
    if not look.loaders:
        return own_only(look) or "the code makes no torch.utils.data.DataLoader"
    if all(loader.num_workers for loader in look.loaders):
        return "its loaders have worker processes already"
    return None


@contextmanager
def _with_workers(device: torch.device) -> Iterator[None]:
    from torch.utils.data import DataLoader

    plain: Any = DataLoader.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) < 6 and not options.get("num_workers"):  # the sixth is num_workers
            options |= {"num_workers": WORKERS, "persistent_workers": True}
            options.setdefault("pin_memory", device.type == "cuda")
        plain(self, *arguments, **options)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__init__ = plain  # type: ignore[method-assign]


CHANGE = Change(
    causes=("input",),
    how=f"DataLoader(…, num_workers={WORKERS}, persistent_workers=True, pin_memory=True on a GPU)",
    why_not=_why_not,
    before=_with_workers,
)
