"""AdamW written out, gradient clipping, and the optimizers that a benchmark can choose from."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import kernels


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019, algorithm 2), one parameter at a time.

    As in torch's AdamW, the decay is multiplied by the learning rate. State per parameter: two tensors of its shape
    (first and second moment) and the step's number; with `master_weights` also `master_param`.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decay per unit of learning rate.
        capturable: Keep the step's number on the parameter's device, so that a CUDA graph can count. The learning rate
            may then be a tensor without axes on that device, which is read at each step.
        master_weights: Keep a float32 copy of each parameter, made at its first step, and float32 moments; each step
            updates these and rounds the copy into the parameter (Micikevicius et al., 2018, section 3.1). So updates
            that are too small for a bfloat16 parameter accumulate. Load a model's weights before the first step: the
            next step would overwrite them.

    Raises:
        ValueError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"out of range: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}")
        if isinstance(lr, Tensor) and not capturable:
            raise ValueError("a learning rate in a tensor needs capturable=True")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        defaults["master_weights"] = master_weights
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of another AdamW without `amsgrad`.

        With `master_weights`, those in the state are taken if they are float32, else made from the parameters at the
        next step; without, they are dropped.

        Raises:
            ValueError: the state is of an optimizer with `amsgrad` or `maximize`.
        """
        if any(group.get(name) for group in state_dict["param_groups"] for name in ("amsgrad", "maximize")):
            raise ValueError("a state of AdamW with amsgrad or maximize: this one does neither")
        chosen = [group["master_weights"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, saved, master_weights in zip(self.param_groups, state_dict["param_groups"], chosen, strict=True):
            group["master_weights"] = master_weights
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                state, values = self.state.get(parameter, {}), state_dict["state"].get(number, {})
                # An optimizer that has no master weights keeps those that it loads, rounded, and does not update them.
                if not master_weights or values.get("master_param", parameter).dtype != torch.float32:
                    state.pop("master_param", None)
                if master_weights:
                    # torch has rounded all but the step to the parameter's dtype
                    for name in state.keys() - {"step"}:
                        state[name] = values[name].to(parameter.device, torch.float32)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Returns the closure's loss; None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update([parameter for parameter in group["params"] if parameter.grad is not None], group)
        return loss

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            state = self._state_of(parameter, group)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            first, second = state["exp_avg"], state["exp_avg_sq"]
            weight = state["master_param"] if group["master_weights"] else parameter
            gradient = parameter.grad.to(weight.dtype)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            first.mul_(beta1).add_(gradient, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            # Bias corrections: both moments start at zero and are too small at first.
            step_size = group["lr"] / (1 - beta1 ** state["step"])
            denominator = second.sqrt().div_((1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
            if group["capturable"]:
                weight.sub_(first.div(denominator).mul_(step_size))
            else:
                weight.addcdiv_(first, denominator, value=-step_size)
            if group["master_weights"]:
                parameter.copy_(weight)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state; make it at the first step."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RuntimeError("AdamW takes no sparse gradients: make them dense (sparse=False)")
            if parameter.is_complex():  # whose parts have a moment each
                raise RuntimeError("AdamW takes no complex parameters, which torch's does (torch_adamw)")
            dtype = torch.float32 if group["master_weights"] else parameter.dtype
            state["step"] = self._counter(parameter, group)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        if group["master_weights"] and "master_param" not in state:
            state["master_param"] = parameter.detach().to(torch.float32, copy=True)
        return state

    def _counter(self, parameter: Tensor, group: dict[str, Any]) -> Tensor | int:
        # In float64: 1 - beta2 ** step is near 0 at first.
        return torch.zeros((), dtype=torch.float64, device=parameter.device) if group["capturable"] else 0


class TritonAdamW(AdamW):
    """AdamW whose update is one pass of a Triton kernel over each parameter: `kernels.adamw`.

    State as of torch's AdamW with `fused`: two moments of a parameter's shape, and the step's number, a float32 tensor
    on the device; with `master_weights` also `master_param`. A CUDA graph can capture a step, with the learning rate in
    a tensor. Parameters may be DTensors. Raises ValueError: as AdamW; at a step, parameters are not in float32,
    bfloat16 or float16 on a CUDA device.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for group in (self.defaults, *self.param_groups):
            group["fused"] = True  # for torch's AdamW that loads this state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of another AdamW without `amsgrad`, which may count elsewhere."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self._state_of(parameter, group) for parameter in parameters]
        weights = [_local(parameter) for parameter in parameters]
        masters = [_local(state["master_param"]) for state in states] if group["master_weights"] else None
        steps = [state["step"] for state in states]
        lr, device = group["lr"], parameters[0].device
        kernels.adamw(
            masters or weights,
            [_local(parameter.grad) for parameter in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            steps,
            lr.to(device) if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            copies=weights if masters else None,
        )
        torch._foreach_add_(steps, 1)

    def _counter(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=parameter.device)


def _local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their common L2 norm is at most `max_norm`. Returns the norm before, a
    scalar tensor; nothing here waits for the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "torch_adamw": (torch.optim.AdamW, {}),
    "torch_fused_adamw": (torch.optim.AdamW, {"fused": True}),
    "triton_adamw": (TritonAdamW, {}),
}
"""The optimizers by their names in specs: class and arguments."""


def class_and_arguments(name: str, *, master_weights: bool) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return what makes an optimizer of OPTIMIZERS. Only ours have the argument `master_weights`."""
    optimizer_class, arguments = OPTIMIZERS[name]
    return optimizer_class, {**arguments, **({"master_weights": True} if master_weights else {})}


def make_optimizer(
    name: str, model: nn.Module, lr: float | Tensor = 1e-3, *, capturable: bool = False, master_weights: bool = False
) -> Optimizer:
    """Make the benchmark spec's `optimizer` over the model's trainable parameters.

    `torch_adamw` is torch's default for the device (on a GPU, horizontally fused "foreach"), `torch_fused_adamw` its
    single-kernel one, `triton_adamw` our kernel, which needs a GPU. A `capturable` one may be captured in a CUDA graph,
    with its learning rate in a tensor. With `master_weights`, ours keep a float32 copy of each parameter. Raises
    ValueError: there is no such optimizer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; known are {', '.join(OPTIMIZERS)}")
    optimizer_class, arguments = class_and_arguments(name, master_weights=master_weights)
    made: Optimizer = optimizer_class(parameters, lr=lr, capturable=capturable, **arguments)  # type: ignore[call-arg]
    return made
