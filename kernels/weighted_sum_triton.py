"""Weighted sum over the last axis in Triton: x (…, columns) times weight (columns), summed to (…).

Reads each number once, forward and backward. The weight's gradient is a sum over all rows: each program writes the sum
over its own rows, and these are added up after, in one fixed order. Sums are in float32, or in float64 for float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .derivatives import register
from .interpreted import patch_interpreter
from .rows import as_rows, check_device, check_floating, wide, wide_dtype

patch_interpreter()

ROWS = 32
"""Rows of a program, forward."""
GRADIENT_ROWS = 128
"""Rows that one program of the backward pass adds up into a row of partial sums."""
COLUMNS = 128
"""Columns of a tile."""


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sum of x's last axis, weighted.

    Args:
        x: (…, columns), floating point, on a CUDA device.
        weight: (columns,), of x's dtype.

    Returns:
        (…), of x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        NoDerivative: in forward mode and in torch.func.grad. Second derivatives are right.
    """
    out: Tensor = _weighted_sum(x, weight)
    return out


@torch.library.custom_op("flopwatch::weighted_sum", mutates_args=())
def _weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _result(x, weight)
    check_device(x.device, _NAMES[1])
    if not x.numel():
        return out.zero_()
    rows = as_rows(x)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _forward_kernel[(triton.cdiv(len(rows), ROWS),)](
            rows, weight.contiguous(), out, rows.stride(0), *rows.shape,
            SUM=wide(x), ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return out


@_weighted_sum.register_fake
def _result(x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() == 0 or weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"expected x (…, columns) and weight (columns), not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_floating(x, weight)
    if weight.dtype != x.dtype:
        raise ValueError(f"expected tensors of one dtype, not {x.dtype} and {weight.dtype}")
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op("flopwatch::weighted_sum_backward", mutates_args=())
def _weighted_sum_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    rows = as_rows(x)
    programs = triton.cdiv(len(rows), GRADIENT_ROWS)
    partial = x.new_empty((programs, len(weight)), dtype=wide_dtype(x))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _backward_kernel[(programs * triton.cdiv(len(weight), COLUMNS),)](  # axis 0: the others end at 65 535
            gradient.contiguous(), rows, weight.contiguous(), dx, partial, rows.stride(0), *rows.shape,
            SUM=wide(x), STEPS=GRADIENT_ROWS // ROWS, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


@_weighted_sum_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _weighted_sum_backward(gradient, *ctx.saved_tensors)
    return gradients


def _save_all(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_again(ctx: Any, dx: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass is bilinear: gradient ⊗ weight, and gradient · x."""
    gradient, x, weight = ctx.saved_tensors
    of_gradient = _weighted_sum(dx, weight) + _weighted_sum(x, dweight)
    of_x, of_weight = _weighted_sum_backward(gradient, dx, dweight)
    return of_gradient, of_x, of_weight


_NAMES = "weighted_sum", "(x * weight).sum(-1)"
register(_weighted_sum, *_NAMES, _differentiate, _save)
register(_weighted_sum_backward, *_NAMES, _differentiate_again, _save_all)


@triton.jit
def _forward_kernel(
    x, weight, out, stride, rows, columns, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], SUM)
    for start in tl.range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x_tile = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        w = tl.load(weight + column, mask=column < columns, other=0.0)
        total += tl.sum(x_tile.to(SUM) * w.to(SUM)[None, :], 1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _backward_kernel(
    gradient, x, weight, dx, partial, stride, rows, columns,
    SUM: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of columns of dx, and of one row of partial sums of the weight's gradient."""
    tiles = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(SUM)
    total = tl.zeros([COLUMNS], SUM)
    for step in tl.range(0, STEPS):
        row = (program * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None]
        g = tl.load(gradient + row, mask=row < rows, other=0.0).to(SUM)
        x_tile = tl.load(x + place * stride + column[None, :], mask=inside, other=0.0).to(SUM)
        total += tl.sum(x_tile * g[:, None], 0)
        tl.store(dx + place * columns + column[None, :], (g[:, None] * w[None, :]).to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program.to(tl.int64) * columns + column, total, mask=column < columns)
