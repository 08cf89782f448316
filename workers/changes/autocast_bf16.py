"""Matrix products in bfloat16, by autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from workers.changes._base import Change, Look

if TYPE_CHECKING:
    from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if look.names["aten::convolution"]:
        return None
    if not look.products:
        return "a step multiplies no matrices"
    if "fp32" not in look.products:
        return "none of its matrix products is in float32"
    return None


def _autocast(step: OwnStep) -> AbstractContextManager[None]:
    import torch

    return step.inside(lambda: torch.autocast(step.device.type, torch.bfloat16))


def _fields(_look: Look) -> dict[str, Any]:
    return {"precision": "bf16"}


CHANGE = Change(
    causes=("precision", "kernels", "attention"),
    how="with torch.autocast(device.type, torch.bfloat16): around the step",
    why_not=_why_not,
    fields=_fields,
    after=_autocast,
)
