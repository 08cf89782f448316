"""Batches made by worker processes, ahead of the step."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from workers.changes._base import LOADER_ANEW, Change, Look, cores, own_only
from workers.changes._loaders import loaders_made
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


def repeats(dataset: Any) -> bool:
    """Return True if each worker process may give all samples: an iterable dataset that does not share them out."""
    if not isinstance(dataset, IterableDataset):
        return False
    functions = [one for kind in type(dataset).__mro__[:-1] for one in vars(kind).values() if inspect.isfunction(one)]
    return not any("get_worker_info" in _names(function.__code__) for function in functions)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, and those inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _with_workers(device: torch.device) -> AbstractContextManager[None]:
    def change(options: dict[str, Any]) -> None:
        if not options.get("num_workers"):
            if repeats(options["dataset"]):
                raise Unsupported(
                    "each worker process may read all of its iterable dataset, whose class does not share it out by "
                    "torch.utils.data.get_worker_info()"
                )
            options |= {"num_workers": workers(), "persistent_workers": True}
            options.setdefault("pin_memory", device.type == "cuda")

    return loaders_made(change)


CHANGE = Change(
    causes=("input",),
    how="DataLoader(…, num_workers=N, persistent_workers=True), N up to the number of cores; on a GPU pin_memory=True",
    why_not=_why_not,
    before=_with_workers,
)
