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
