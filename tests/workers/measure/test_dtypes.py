"""The list of data types of a step, on a model whose answer is known."""

from typing import Any

import torch
from torch import Tensor, nn

from workers.measure.dtypes import DtypeAudit, kept_in_float32, tensors_in


class Mixed(nn.Module):
    """Parts in several data types, one of them used in two."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.any_type = nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Any]:
        wide = self.any_type(self.wide(x))
        return {"logits": (wide, [self.any_type(self.narrow(wide.bfloat16()))])}


def test_everything_is_listed_with_its_type() -> None:
    model = Mixed()
    audit, losses = DtypeAudit(model), list[Tensor]()

    def forward() -> Tensor:
        losses.append(sum((tensor.double().mean() for tensor in tensors_in(model(torch.ones(2, 4)))), torch.zeros(())))
        return losses[0]

    audit.run(forward, lambda: losses[0].backward(), lambda loss: loss.half())
    tensors, full, half = audit.tensors(), torch.float32, torch.bfloat16
    assert [(one.role, one.name, one.dtype) for one in tensors if one.role not in ("parameter", "gradient")] == [
        *(("logits", "", dtype) for dtype in (full, half)),
        *(("module_output", name, dtype) for name, dtype in (("wide", full), ("narrow", half))),
        *(("module_output", "any_type", dtype) for dtype in (full, half)),
        ("loss", "", torch.float64),
        ("scaled_loss", "", torch.float16),
    ]
    assert [one.name for one in kept_in_float32(tensors)] == ["wide", "any_type"]
    assert not any(module._forward_hooks for module in model.modules()), "no hook stays behind"
