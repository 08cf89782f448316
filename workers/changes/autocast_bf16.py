"""Matrix products in bfloat16, by autocast."""

import torch

from workers.changes._base import Change, Look, no_fp32


def _why_not(look: Look) -> str | None:
    return None if look.names["aten::convolution"] else no_fp32(look)


CHANGE = Change(
    causes=("precision", "kernels", "attention"),
    how="with torch.autocast(device.type, torch.bfloat16): around the step",
    why_not=_why_not,
    fields=lambda _: {"precision": "bf16"},
    after=lambda step: step.inside(lambda: torch.autocast(step.device.type, torch.bfloat16)),
)
