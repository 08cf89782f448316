"""The list of data types of a step, on models whose answer is known."""

from collections.abc import Callable
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


def audited(model: nn.Module, *, broken: Callable[[], None] | None = None) -> list[TypedTensor]:
    audit = DtypeAudit(model)
    losses: list[Tensor] = []

    def forward() -> Tensor:
        losses.append(sum((tensor.double().mean() for tensor in tensors_in(model(torch.ones(2, 4)))), torch.zeros(())))
        if broken is not None:
            broken()
        return losses[0]

    try:
        audit.run(forward, lambda: losses[0].backward(), lambda loss: loss.half())
    except RuntimeError as error:
        return audit.tensors(scaled=True, error=str(error))
    return audit.tensors(scaled=True)


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


def test_a_step_that_fails_keeps_what_was_seen() -> None:
    def broken() -> None:
        raise RuntimeError('"log" not implemented for "Half"')

    model = Mixed()
    tensors = audited(model, broken=broken)
    assert types(tensors, "module_output")[0] == ("wide", "Linear", torch.float32)
    missing = [tensor for tensor in tensors if tensor.dtype is None]
    assert {tensor.role for tensor in missing} == {"loss", "scaled_loss", "gradient"}
    reasons = {tensor.reason for tensor in missing if not tensor.name.startswith("frozen")}
    assert reasons == {'"log" not implemented for "Half"'}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_pass_that_fails_has_no_logits() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    tensors = audited(nn.Sequential(nn.Linear(4, 4), Broken()))
    assert types(tensors, "logits") == [("", "Sequential", None)]
    assert types(tensors, "module_output") == [("0", "Linear", torch.float32)]
