"""The list of data types of a step, on models whose answer is known."""

from typing import Any

import torch
from torch import Tensor, nn

from workers.measure.dtypes import DtypeAudit, TypedTensor, kept_in_float32, tensors_in


class Mixed(nn.Module):
    """Parts in several data types, one of them used twice, one frozen, one not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.again = self.narrow
        self.frozen = nn.LayerNorm(4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.any_type = nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Any]:
        wide = self.any_type(self.frozen(self.wide(x)))
        narrow = self.any_type(self.again(self.narrow(wide.bfloat16())))
        return {"logits": (wide, [narrow])}


def audited(model: nn.Module) -> list[TypedTensor]:
    audit = DtypeAudit(model)
    losses: list[Tensor] = []

    def forward() -> Tensor:
        losses.append(sum((tensor.double().mean() for tensor in tensors_in(model(torch.ones(2, 4)))), torch.zeros(())))
        return losses[0]

    audit.run(forward, lambda: losses[0].backward(), lambda loss: loss.half())
    return audit.tensors()


def types(tensors: list[TypedTensor], role: str) -> list[tuple[str, str, torch.dtype | None]]:
    return [(tensor.name, tensor.module_class, tensor.dtype) for tensor in tensors if tensor.role == role]


def test_everything_is_listed_with_its_type() -> None:
    model = Mixed()
    tensors = audited(model)
    full, half = torch.float32, torch.bfloat16
    assert types(tensors, "parameter")[:3] == [
        ("wide.weight", "Linear", full),
        ("wide.bias", "Linear", full),
        ("narrow.weight", "Linear", half),
    ]
    assert len(types(tensors, "parameter")) == len(types(tensors, "gradient")) == 8, (
        "what is there twice is listed once"
    )
    assert types(tensors, "module_output") == [
        ("wide", "Linear", full),
        ("narrow", "Linear", half),
        ("frozen", "LayerNorm", full),
        ("any_type", "Identity", full),
        ("any_type", "Identity", half),
    ]
    assert types(tensors, "logits") == [("", "Mixed", full), ("", "Mixed", half)]
    assert types(tensors, "loss") == [("", "", torch.float64)]
    assert types(tensors, "scaled_loss") == [("", "", torch.float16)]
    assert [tensor.name for tensor in kept_in_float32(tensors)] == ["wide", "frozen", "any_type"]
    assert not any(module._forward_hooks for module in model.modules()), "no hook stays behind"
