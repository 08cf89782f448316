"""The norm of all gradients in a few kernels, and not in some for each parameter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look, all_replaced, own_gpu_only

if TYPE_CHECKING:
    import torch


def _why_not(look: Look) -> str | None:
    if reason := own_gpu_only(look):
        return reason
    assert look.own is not None
    parameters = sum(1 for _ in look.own.model.parameters())
    if look.names["aten::linalg_vector_norm"] < max(2, parameters):
        return "the step takes no norm of each gradient"
    return None


def _foreach(_device: torch.device) -> AbstractContextManager[None]:
    import torch

    def instead(plain: Any) -> Any:
        return lambda *given, **options: plain(*given, **{**options, "foreach": True})

    utils = torch.nn.utils
    return all_replaced(instead, (utils, "clip_grad_norm_"), (utils.clip_grad, "clip_grad_norm_"))


CHANGE = Change(
    causes=("launches", "optimizer", "kernels", "host"),
    how="torch.nn.utils.clip_grad_norm_(…, foreach=True)",
    why_not=_why_not,
    before=_foreach,
)
