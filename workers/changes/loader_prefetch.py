"""More batches ahead of the step, by worker processes that live on when the loader begins again."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from workers.changes._base import LOADER_ANEW, Change, Look, own_only
from workers.changes._loaders import loaders_made
from workers.changes.loader_workers import repeats, workers

FACTOR = 4
WITHOUT = "its loaders have no worker processes: loader_workers adds them"


def _why_not(look: Look) -> str | None:
    if look.makes_loader:
        return LOADER_ANEW
    return own_only(look) or (None if any(look.loaders) else WITHOUT)


def _ahead(_device: torch.device) -> AbstractContextManager[None]:
    def change(options: dict[str, Any]) -> None:
        if number := options.get("num_workers"):
            options["num_workers"] = number if repeats(options["dataset"]) else max(number, workers())
            ahead = max(FACTOR, options.get("prefetch_factor") or 0)
            options |= {"persistent_workers": True, "prefetch_factor": ahead}

    return loaders_made(change)


CHANGE = Change(
    causes=("input",),
    how=f"DataLoader(…, num_workers=N, persistent_workers=True, prefetch_factor={FACTOR}), N up to the number of cores",
    why_not=_why_not,
    before=_ahead,
)
