"""Gradients that are dropped, and not filled with zeros."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look, all_replaced, own_only

if TYPE_CHECKING:
    import torch


def _why_not(look: Look) -> str | None:
    if look.own is None:
        return own_only(look)
    parameters = sum(1 for _ in look.own.model.parameters())
    if look.names["aten::_foreach_zero_"] or look.names["aten::zero_"] >= max(1, parameters):
        return None
    return "the step fills no gradients with zeros"


def _dropping(_device: torch.device) -> AbstractContextManager[None]:
    import torch

    def instead(plain: Any) -> Any:
        return lambda self, set_to_none=True: plain(self, set_to_none=True)

    return all_replaced(instead, (torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"))


CHANGE = Change(
    causes=("optimizer", "launches", "kernels", "host"),
    how="optimizer.zero_grad(set_to_none=True)",
    why_not=_why_not,
    before=_dropping,
)
