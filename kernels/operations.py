"""Operations other than attention, each with its plain PyTorch, as `kernel` jobs measure them.

Only `weighted_sum` has a kernel of ours; the others are there to be compared with kernels of users.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.registry import DTYPES, Implementation, Kernel

EPSILON = 1e-5


def rotary_angles(context_length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position * theta^(-2i / head_dim), each (context_length, head_dim / 2), float32."""
    # In float64: a float32 product loses the angle at long contexts.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[2i], x[2i+1]) by its position's angle; x is (…, sequence, head_dim)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPSILON)


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _plain_weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def _right_weighted_sum(inputs: Sequence[Tensor], grad_out: Tensor | None) -> list[Tensor]:
    x, weight = inputs
    # Outer and inner product: the gradients of x and weight.
    return [x @ weight, *([] if grad_out is None else [torch.outer(grad_out, weight), grad_out @ x])]


def _triton_weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    from kernels.weighted_sum_triton import weighted_sum

    return weighted_sum(x, weight)


rms_norm = Kernel("rms_norm", lambda rows, columns: ((rows, columns), (columns,)), _plain_rms_norm, linear_in=1)
"""x (rows, columns) divided by the root of its rows' mean squares, times weight (columns)."""
swiglu = Kernel("swiglu", lambda rows, columns: ((rows, columns), (rows, columns)), _plain_swiglu, linear_in=1)
"""silu(gate) times up, both (rows, columns)."""
weighted_sum = Kernel(
    "weighted_sum",
    lambda rows, columns: ((rows, columns), (columns,)),
    _plain_weighted_sum,
    linear_in=1,
    kernels=[Implementation("triton", _triton_weighted_sum, {"cuda": DTYPES}, of="weighted_sum")],
    oracle=_right_weighted_sum,
)
"""x (rows, columns) times weight (columns), summed over columns."""
