"""One kernel, or one loop in C++, for all parameters of an optimizer."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.optim

from workers.changes._base import OPTIMIZER_ANEW, Change, Done, Look, replaced
from workers.measure.own_step import OwnStep
from workers.outcome import Unsupported

FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch.optim that take `fused`."""


def _why_not(look: Look) -> str | None:
    if look.own is None:
        if look.spec.mode != "train_step":
            return f"mode {look.spec.mode} has no optimizer"
        return Done("it is fused already") if look.spec.optimizer in ("torch_fused_adamw", "triton_adamw") else None
    if look.makes_optimizer:
        return OPTIMIZER_ANEW
    plain = [one for one in look.own.optimizers if type(one).__module__.startswith("torch.optim")]
    takes = [one for one in plain if type(one).__name__ in FUSED]
    if not all(map(_is_fused, takes)):
        return None
    if written := [*(one for one in look.own.optimizers if one not in plain), *look.own.plain_optimizers()]:
        return f"{_names(written)} is your own class: one of torch.optim with fused=True may replace it"
    if takes and len(takes) == len(plain):
        return Done("it is fused already")
    return f"torch has no fused form of its optimizers ({_names(one for one in plain if one not in takes) or 'none'})"


def _names(optimizers: Iterable[Any]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in optimizers}))


@contextmanager
def _fused(_device: torch.device) -> Iterator[None]:
    with ExitStack() as undo:
        for name in FUSED:
            undo.enter_context(_patched(getattr(torch.optim, name)))
        yield


@contextmanager
def _still_fused(step: OwnStep) -> Iterator[None]:
    if not all(map(_is_fused, (one for one in step.optimizers if one.defaults.get("fused")))):
        raise Unsupported("its load_state_dict undoes fused=True: set it in the param_groups that are loaded, too")
    yield


def _is_fused(optimizer: Any) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _patched(optimizer: Any) -> AbstractContextManager[None]:
    plain = optimizer.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "foreach": None, "fused": True})

    return replaced(optimizer, "__init__", init)


CHANGE = Change(
    causes=("optimizer", "launches"),
    how="fused=True for the optimizer",
    why_not=_why_not,
    fields=lambda _: {"optimizer": "torch_fused_adamw"},
    before=_fused,
    after=_still_fused,
)
