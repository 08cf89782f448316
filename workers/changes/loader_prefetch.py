"""More batches ahead of the step, by worker processes that live on when the loader begins again."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader

from workers.changes._base import LOADER_ANEW, Change, Look, own_only, replaced
from workers.changes.loader_workers import workers

FACTOR = 4
WITHOUT = "its loaders have no worker processes: loader_workers adds them"


def _why_not(look: Look) -> str | None:
    if look.makes_loader:
        return LOADER_ANEW
    return own_only(look) or (None if any(look.loaders) else WITHOUT)


def _ahead(_device: torch.device) -> AbstractContextManager[None]:
    plain: Any = DataLoader.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if options.get("num_workers"):
            options["num_workers"] = max(options["num_workers"], workers())
            options |= {"persistent_workers": True, "prefetch_factor": FACTOR}
        plain(self, *arguments, **options)

    return replaced(DataLoader, "__init__", init)


CHANGE = Change(
    causes=("input",),
    how=f"DataLoader(…, num_workers=N, persistent_workers=True, prefetch_factor={FACTOR}), N up to the number of cores",
    why_not=_why_not,
    before=_ahead,
)
