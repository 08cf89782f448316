"""Wrong kernels: each is plain PyTorch in float32 with one fault, as kernels have them.

The judge has to call every one of them wrong, on a GPU and on the CPU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import operations
from kernels.attention.reference import attention

Function = Callable[..., Tensor]
EPSILON = operations.EPSILON
TILE = 64
"""Keys that are added up before a sum is rounded."""


@dataclass(frozen=True)
class Fault:
    """A wrong kernel, and the problem in which it has to show."""

    name: str
    function: Function
    kernel: str = "attention"
    dtype: str = "bf16"
    backward: bool = False
    problem: Mapping[str, Any] = field(default_factory=dict)
    """Fields of attention's problem."""
    length: int = 0
    """Least number of keys in which it has to show."""


class _Scaled(torch.autograd.Function):
    """A tensor, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor; its gradient will be multiplied by the factor."""
    return _Scaled.apply(tensor, factor)


def right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
    """Attention with one rounding, of the result."""
    out: Tensor = attention(q.float(), k.float(), v.float(), is_causal, **options)
    return out.to(q.dtype)


def _with(**changes: Callable[[Any], Any]) -> Function:
    """Attention with changed options; a function gets the right one, None if it is not given."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
        options["scale"] = options.get("scale") or 1 / math.sqrt(q.shape[-1])
        changed = {name: change(options.get(name)) for name, change in changes.items()}
        return right(q, k, v, is_causal, **options | changed)

    return wrong


def _of_inputs(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Function:
    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
        return right(*change(q, k, v), is_causal, **options)

    return wrong


def _of_output(change: Callable[[Tensor], Tensor]) -> Function:
    """Attention whose output is changed before it is rounded."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
        return change(attention(q.float(), k.float(), v.float(), is_causal, **options)).to(q.dtype)

    return wrong


def _exponentials(q: Tensor, k: Tensor, is_causal: bool, *, subtract: bool = True) -> Tensor:
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores - scores.amax(-1, keepdim=True) if subtract else scores).exp()


def _sum_in_inputs_dtype(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    weights = _exponentials(q, k, is_causal)
    total = torch.zeros_like(q[..., :1])
    for part in weights.split(TILE, -1):
        total = total + part.sum(-1, keepdim=True).to(q.dtype)
    return (weights @ v.float() / total.float()).to(q.dtype)


def _without_maximum(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    weights = _exponentials(q, k, is_causal, subtract=False)
    return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)


def _fp8(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def _in_fp8(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    weights = torch.softmax(q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
    return (_fp8(weights * 256) @ v.float() / 256).to(q.dtype)


def keeps(key: Callable[[Tensor], Any]) -> Function:
    """Attention that keeps the weights by what the key of K is, and only multiplies them with V."""
    kept: dict[Any, Tensor] = {}

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        if key(k) not in kept:
            weights = _exponentials(q, k, is_causal).detach()
            kept[key(k)] = weights / weights.sum(-1, keepdim=True)
        return (kept[key(k)] @ v.float()).to(q.dtype)

    return wrong


def _changed_gradient(index: int, factor: float) -> Function:
    def change(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (scaled_gradient(tensor, factor) if place == index else tensor for place, tensor in enumerate(inputs))
        return q, k, v

    return _of_inputs(change)


def _log_sum_exp_with(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The backward pass computes its weights with a scale that is off by 0.3 %."""
    out = right(q, k, v, is_causal)
    return out.detach() + (other := right(q * 1.003, k, v, is_causal)) - other.detach()


ATTENTION = [
    Fault("output × 0.997", _of_output(lambda out: out * 0.997)),
    Fault("scale + 0.3 %, causal", _with(scale=lambda scale: 1.003 * scale), problem={"is_causal": True}),
    Fault("scale + 0.3 % of 0.3", _with(scale=lambda scale: 1.003 * scale), problem={"scale": 0.04}),
    Fault("scale + 0.1 %, fp16", _with(scale=lambda scale: 1.001 * scale), dtype="fp16"),
    Fault("scale + 0.01 %, fp32", _with(scale=lambda scale: 1.0001 * scale), dtype="fp32"),
    Fault("sum over keys in bf16, by tiles", _sum_in_inputs_dtype, length=2048),
    Fault("no maximum subtracted", _without_maximum),
    Fault("weights in fp8", _in_fp8),
    Fault("window + 1", _with(window=lambda window: window + 1), problem={"is_causal": True, "window": 100}),
    Fault("softcap 2 % off", _with(softcap=lambda cap: 1.02 * cap), problem={"softcap": 20.0}),
    Fault("dq × 0.997", _changed_gradient(0, 0.997), backward=True, problem={"is_causal": True}),
    Fault("dk × 1.01", _changed_gradient(1, 1.01), backward=True),
    Fault("dv × 0.99, fp16", _changed_gradient(2, 0.99), backward=True, dtype="fp16"),
    Fault("scale + 0.3 % backward", _log_sum_exp_with, backward=True),
    Fault("keeps weights by K's address", keeps(Tensor.data_ptr)),
]


def _rms_norm(divide: Callable[[Tensor], Tensor], factor: float = 1.0, of_gradient: float = 1.0) -> Function:
    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide / divide(wide) * scaled_gradient(weight.float(), of_gradient) * factor).to(x.dtype)

    return wrong


def _root(epsilon: float = EPSILON, less: int = 0) -> Callable[[Tensor], Tensor]:
    def root(x: Tensor) -> Tensor:
        return (x.square().sum(-1, keepdim=True) / (x.shape[-1] - less) + epsilon).sqrt()

    return root


def _loss(change: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """The mean over rows of what `change` makes of logits (rows, vocabulary) and targets."""

    def wrong(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        targets = operations._targets(len(hidden), len(weight), hidden.device)
        return (change(hidden.float() @ weight.float().T, targets).mean() * scale.float()).to(hidden.dtype)

    return wrong


def _of_target(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _times(kernel: str, factor: float) -> Function:
    def wrong(*inputs: Tensor) -> Tensor:
        plain = getattr(operations, kernel).plain
        out: Tensor = plain(*(one.float() for one in inputs)) * factor
        return out.to(inputs[0].dtype)

    return wrong


OTHERS = [
    Fault("weighted_sum × 1.01", _times("weighted_sum", 1.01), "weighted_sum"),
    *(Fault(f"{name} × 1.001", _times(name, 1.001), name) for name in ("rms_norm", "rope", "swiglu")),
    Fault("rms_norm with eps 1e-6", _rms_norm(_root(1e-6)), "rms_norm"),
    Fault("rms_norm over n - 1", _rms_norm(_root(less=1)), "rms_norm"),
    Fault("rms_norm over n - 1, fp32", _rms_norm(_root(less=1)), "rms_norm", dtype="fp32"),
    Fault("rms_norm, weight's gradient × 1.01", _rms_norm(_root(), of_gradient=1.01), "rms_norm", backward=True),
    Fault("loss without the last 16 words", _loss(lambda z, t: z[:, :-16].logsumexp(-1) - _of_target(z, t)),
          "linear_cross_entropy"),
    Fault("loss without subtracting the maximum", _loss(lambda z, t: z.exp().sum(-1).log() - _of_target(z, t)),
          "linear_cross_entropy"),
    Fault("loss × 1.01", _loss(lambda z, t: 1.01 * (z.logsumexp(-1) - _of_target(z, t))), "linear_cross_entropy"),
]  # fmt: skip
FAULTS = [*ATTENTION, *OTHERS]
