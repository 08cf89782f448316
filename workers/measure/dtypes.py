"""Lists the data type of every parameter, module output, loss and gradient of one training step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

Role = Literal["parameter", "module_output", "logits", "loss", "scaled_loss", "gradient"]
OPERATORS: Mapping[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.Linear: functional.linear,
    nn.LayerNorm: lambda x, _weight: functional.layer_norm(x, x.shape[-1:]),
    nn.RMSNorm: lambda x, _weight: functional.rms_norm(x, x.shape[-1:]),
    nn.Softmax: lambda x, _weight: functional.softmax(x, -1),
    nn.LogSoftmax: lambda x, _weight: functional.log_softmax(x, -1),
}
"""Modules that are one operator for which autocast has a rule; others pass types on."""


def under_cudas_autocast(module: nn.Module, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type that CUDA's autocast to `dtype` gives a module's output; None for a module without a rule.

    Torch's own rule, without a GPU: fake tensors take the operators' path, and hold no data.
    """
    function = next((one for kind, one in OPERATORS.items() if isinstance(module, kind)), None)
    if function is None:
        return None
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        inputs = torch.empty(2, 2, dtype=dtype, device="cuda"), torch.empty(2, 2, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            return function(*inputs).dtype
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


@dataclass(frozen=True)
class TypedTensor:
    """One tensor of a step, and its data type."""

    role: Role
    """`logits` are the output of the whole model; `module_output` is that of a module in it."""
    name: str
    """Name of the parameter or module in the model; empty for logits and losses."""
    module_class: str
    """Class of the module that has the parameter or gives the output; empty for losses."""
    dtype: torch.dtype | None
    reason: str | None = None
    """The reason why there is no data type."""
    leaf: bool = False
    """True for the output of a module that has no modules in it."""


class DtypeAudit:
    """Watches one step of a model. `model`: the model; a module or parameter that it has twice is listed under its
    first name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._outputs: dict[str, list[torch.dtype]] = {}
        self._losses: dict[Role, torch.dtype] = {}

    def run(
        self, forward: Callable[[], Tensor], backward: Callable[[], None], scaled: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Run the step. `scaled`: scales a loss as the step does before its backward pass; None: it does not."""
        with self._watched_outputs():
            loss = forward()
        self._losses["loss"] = loss.dtype
        if scaled is not None:
            self._losses["scaled_loss"] = scaled(loss.detach()).dtype
        backward()

    @contextmanager
    def _watched_outputs(self) -> Iterator[None]:
        def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                seen = self._outputs.setdefault(name, [])
                seen += [tensor.dtype for tensor in tensors_in(output) if tensor.dtype not in seen]

            return hook

        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hooks.callback(module.register_forward_hook(hook_for(name)).remove)
            yield

    def tensors(self) -> list[TypedTensor]:
        """Return the tensors in the order of the model. A module with outputs of several types has one entry for each;
        one that was not called, such as a list of others, has none."""
        listed = [
            TypedTensor("parameter", name, self._class_of(name), parameter.dtype)
            for name, parameter in self.model.named_parameters()
        ]
        for name, module in self.model.named_modules():
            role: Role = "module_output" if name else "logits"
            leaf = not any(True for _ in module.children())
            listed += [
                TypedTensor(role, name, type(module).__name__, dtype, leaf=leaf)
                for dtype in self._outputs.get(name, ())
            ]
        listed += [TypedTensor(loss, "", "", dtype) for loss, dtype in self._losses.items()]
        return listed + [self._gradient(name, parameter) for name, parameter in self.model.named_parameters()]

    def _gradient(self, name: str, parameter: nn.Parameter) -> TypedTensor:
        if parameter.grad is not None:
            return TypedTensor("gradient", name, self._class_of(name), parameter.grad.dtype)
        frozen = not parameter.requires_grad
        reason = "the parameter is frozen" if frozen else "the loss does not depend on the parameter"
        return TypedTensor("gradient", name, self._class_of(name), None, reason)

    def _class_of(self, parameter: str) -> str:
        return type(self.model.get_submodule(parameter.rpartition(".")[0])).__name__


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output: a tensor, or sequences and mappings of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from tensors_in(value)


def kept_in_float32(tensors: Sequence[TypedTensor]) -> list[TypedTensor]:
    """Return the outputs in float32 of modules that have no modules in them."""
    return [tensor for tensor in tensors if tensor.leaf and tensor.dtype == torch.float32]
