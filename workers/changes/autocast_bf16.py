"""Matrix products in bfloat16, by autocast."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import dataloader

from workers.changes._base import Change, Look, all_replaced, no_fp32
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    return None if look.names["aten::convolution"] else no_fp32(look)


def _outside(device: torch.device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what lets a function run outside of autocast, after which that has no copies of weights from before it.
    One that is given a closure, which may be a forward pass, stays inside."""

    def outside(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*arguments: Any, **options: Any) -> Any:
            closure = any(map(callable, (*arguments, *options.values())))
            if closure or not torch.is_autocast_enabled(device.type):
                return plain(*arguments, **options)
            with torch.autocast(device.type, enabled=False):
                done = plain(*arguments, **options)
            torch.clear_autocast_cache()
            return done

        return call

    return outside


def _not_around(device: torch.device) -> AbstractContextManager[None]:
    places = ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad"))
    return all_replaced(_outside(device), *places, (dataloader._BaseDataLoaderIter, "__next__"))


@contextmanager
def _forward_passes(step: OwnStep) -> Iterator[None]:
    for optimizer in (*step.optimizers, *step.plain_optimizers()):
        vars(optimizer)["step"] = _outside(step.device)(optimizer.step)
    with step.inside(lambda: torch.autocast(step.device.type, torch.bfloat16)):
        yield


CHANGE = Change(
    causes=("precision", "kernels", "attention"),
    how="with torch.autocast(device.type, torch.bfloat16): around forward passes and losses",
    why_not=_why_not,
    fields=lambda _: {"precision": "bf16"},
    before=_not_around,
    after=_forward_passes,
)
