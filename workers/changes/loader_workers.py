"""Batches made by worker processes, ahead of the step."""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from workers.changes._base import LOADER_ANEW, Change, Look, cores, own_only, replaced
from workers.outcome import Unsupported

MOST = 4


def workers() -> int:
    """Return how many processes a loader gets: at most one for each core."""
    return min(MOST, cores())


def _why_not(look: Look) -> str | None:
    if look.makes_loader:
        return LOADER_ANEW
    if not look.loaders:
        return own_only(look) or "the step reads no torch.utils.data.DataLoader"
    if all(look.loaders):
        return "its loaders have worker processes already"
    return None


def _repeats(dataset: Any) -> bool:
    """Return True if each worker process would give all samples: an iterable dataset that does not share them out."""
    if not isinstance(dataset, IterableDataset):
        return False
    functions = [one for kind in type(dataset).__mro__[:-1] for one in vars(kind).values() if inspect.isfunction(one)]
    return not any("get_worker_info" in function.__code__.co_names for function in functions)


def _with_workers(device: torch.device) -> AbstractContextManager[None]:
    plain: Any = DataLoader.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) < 6 and not options.get("num_workers"):  # the sixth is num_workers
            if _repeats(arguments[0] if arguments else options["dataset"]):
                raise Unsupported(
                    "each worker process would read all of its iterable dataset: share it out in __iter__ by "
                    "torch.utils.data.get_worker_info()"
                )
            options |= {"num_workers": workers(), "persistent_workers": True}
            options.setdefault("pin_memory", device.type == "cuda")
        plain(self, *arguments, **options)

    return replaced(DataLoader, "__init__", init)


CHANGE = Change(
    causes=("input",),
    how="DataLoader(…, num_workers=N, persistent_workers=True), N up to the number of cores; on a GPU pin_memory=True",
    why_not=_why_not,
    before=_with_workers,
)
