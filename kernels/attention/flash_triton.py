"""FlashAttention-2 in Triton, forward and backward: for CUDA devices from Ampere on, best tuned for Hopper.

Takes float32, bfloat16 and float16; head dimensions up to 256; any strides (the last axis is made contiguous if it is
not); grouped keys and values (a multiple of their heads in the queries); any lengths, also different ones. Memory grows
linearly with the length. Products are of the inputs' dtype with float32 sums; those of float32 are exact, to its last
bits, unless torch allows tf32.

`flash_attention` is the function to call. Under it lie two `torch.library` operations, which `torch.compile` takes as
they are, without a graph break; `TritonFlashAttention2` is the same as an autograd.Function.

The backward pass has two forms (see triton_backward). The one that was measured to be faster (see triton_tilings) is
taken; when torch is asked for deterministic algorithms, always two passes, whose results are the same bit for bit in
every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernels.attention import triton_launch as launch
from kernels.attention import triton_tilings as tilings
from kernels.registry import Implementation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, tf32: bool | None = None) -> Tensor:
    """Softmax attention.

    Args:
        q: Queries (batch, heads, queries, head_dim), or (batch, queries, head_dim).
        k: Keys (batch, key heads, keys, head_dim), or (batch, keys, head_dim); `heads` is a multiple of `key heads`.
        v: Values, of k's shape.
        is_causal: Query i sees keys 0 … i only (top-left alignment).
        tf32: Whether products of float32 inputs may be rounded to tf32 (10 bits of mantissa). None: as
            `torch.set_float32_matmul_precision` says.

    Returns:
        Of q's shape.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or are not taken.
    """
    out: Tensor
    if _is_plain(q, k, v):
        out = TritonFlashAttention2.apply(q, k, v, is_causal, tf32)  # type: ignore[no-untyped-call]
    else:
        out = _forward_operation(q, k, v, is_causal, tf32)[0]
    return out


class TritonFlashAttention2(torch.autograd.Function):
    """`TritonFlashAttention2.apply(q, k, v, is_causal=False)`: `flash_attention` as an autograd.Function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, tf32: bool | None = None) -> Tensor:
        """The output; saves it, the inputs, and the log-sum-exp of each query's scores."""
        out, logsumexp = (_forward if _is_plain(q, k, v) else _forward_operation)(q, k, v, is_causal, tf32)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.is_causal, ctx.tf32 = is_causal, tf32
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, out, logsumexp = ctx.saved_tensors
        run = _backward if _is_plain(q, out_gradient) else _backward_operation
        return *run(out_gradient, None, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32), None, None


def _is_plain(*tensors: Tensor) -> bool:
    """Whether kernels can be launched at once.

    Otherwise somebody wants to see an operation: torch.compile, a dispatch mode, a subclass of Tensor. Going through
    torch's dispatcher takes the host as long as the launches do.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and all(type(tensor) in (Tensor, Parameter) for tensor in tensors)
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool | None) -> tuple[Tensor, Tensor]:
    out, logsumexp = _forward_results(q, k, v, is_causal, tf32)
    if out.numel():
        precision = _precision(q, tf32)
        q, k, v, heads_out = _with_heads(q, k, v, out)
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            q, k, v = launch.operands(precision, q, k, v)
            launch.forward(q, k, v, heads_out, logsumexp, is_causal, precision)
    return out, logsumexp


def _backward(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _like(q), _like(k), _like(v)
    if q.numel() == 0:
        return gradients[0], gradients[1].zero_(), gradients[2].zero_()
    out_gradient, q, k, v, out = _with_heads(out_gradient, q, k, v, out)
    dq, dk, dv = _with_heads(*gradients)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        launch.backward(
            out_gradient, q, k, v, out, dq, dk, dv,
            logsumexp.contiguous(), None if logsumexp_gradient is None else logsumexp_gradient.contiguous(),
            is_causal, _precision(q, tf32),
        )  # fmt: skip
    return gradients


def _backward_results(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _like(q), _like(k), _like(v)


def _forward_results(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool | None) -> tuple[Tensor, Tensor]:
    """Room for the output and the log-sum-exp, once the inputs are found to fit."""
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.shape != k.shape:
        raise ValueError(
            "expected q, k and v with three or four axes, k and v of one shape, not "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"batch and head dimension of q {tuple(q.shape)} and k {tuple(k.shape)} differ")
    if q.dim() == 4 and (k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0):
        raise ValueError(f"q's {q.shape[1]} heads are no multiple of k's {k.shape[1]}")
    if not 1 <= q.shape[-1] <= LARGEST_HEAD_DIM:
        raise ValueError(f"the head dimension is {q.shape[-1]}, not between 1 and {LARGEST_HEAD_DIM}")
    if k.shape[-2] == 0:
        raise ValueError("there are no keys")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"expected one of {DTYPES} for q, k and v, not {q.dtype}, {k.dtype} and {v.dtype}")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    return _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _like(tensor: Tensor) -> Tensor:
    """Room for a result: in the input's own order of axes, which callers turn back for free, if its last axis is last.

    Inputs that repeat elements (expanded ones) have no such order.
    """
    result = torch.empty_like(tensor)
    return result if result.stride(-1) == 1 and 0 not in tensor.stride() else tensor.new_empty(tensor.shape)


def _with_heads(*tensors: Tensor) -> list[Tensor]:
    """Each as (batch, heads, rows, head_dim), its last axis contiguous. Results are views: what is written stays."""
    contiguous = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    return [tensor if tensor.dim() == 4 else tensor.unsqueeze(1) for tensor in contiguous]


def _precision(q: Tensor, tf32: bool | None) -> str:
    """How products are done; of half precision, one way only."""
    if q.dtype != torch.float32:
        return "ieee"
    if tf32 is None:
        tf32 = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else tilings.exact_precision(q.device, launch.padded_width(q.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.tf32 = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, out_gradient: Tensor | None, logsumexp_gradient: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    if out_gradient is None:
        out_gradient = torch.zeros_like(out)
    gradients = _backward_operation(out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32)
    return *gradients, None, None


_forward_operation = torch.library.custom_op("flopwatch::flash_attention", _forward, mutates_args=())
_forward_operation.register_fake(_forward_results)
_forward_operation.register_autograd(_differentiate, setup_context=_save)
_backward_operation = torch.library.custom_op("flopwatch::flash_attention_backward", _backward, mutates_args=())
_backward_operation.register_fake(_backward_results)


def _tune(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *, backward: bool, tell: Callable[[str], None]) -> str:
    from kernels.attention.triton_tuning import tune  # which imports this module, and is used on request only

    return tune(q, k, v, is_causal, backward=backward, tell=tell).summary()


implementation = Implementation(
    "triton",
    flash_attention,
    {"cuda": frozenset({"float32", "bfloat16", "float16"})},
    tune=_tune,
)
