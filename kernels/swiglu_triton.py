"""The product in SwiGLU (Shazeer, 2020) in Triton: silu(gate) * up, element by element.

Forward reads gate and up; backward reads them and the result's gradient, and computes silu(gate) again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interpreted import patch_interpreter
from kernels.rows import as_rows, check_device, check_floating, wide

patch_interpreter()

COLUMNS = 2048
"""Elements of a program: part of one row, or of all rows where these follow each other in memory."""
WARPS = 4


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: (…, columns), floating point, on a CUDA device.
        up: Of gate's shape, dtype and device. Both may be halves of one tensor's last axis: they are not copied.

    Returns:
        Of gate's shape and dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    out: Tensor = _swiglu(gate, up)
    return out


@torch.library.custom_op("flopwatch::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _result(gate, up)
    check_device(gate)
    if out.numel():
        rows, ups, outs = _matrices(gate, up, out)
        with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
            _swiglu_kernel[_grid(rows)](
                rows, ups, outs, rows.stride(0), ups.stride(0), rows.shape[1],
                WIDE=wide(gate), COLUMNS=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
    return out


@_swiglu.register_fake
def _result(gate: Tensor, up: Tensor) -> Tensor:
    check_floating(gate, up)
    if gate.dim() == 0 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"expected gate and up of one shape (…, columns) and dtype, not {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}"
        )
    return gate.new_empty(gate.shape)


@torch.library.custom_op("flopwatch::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if gate.numel():
        gradients, rows, ups, dgates, dups = _matrices(gradient, gate, up, dgate, dup)
        with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
            _swiglu_backward_kernel[_grid(rows)](
                gradients, rows, ups, dgates, dups, gradients.stride(0), rows.stride(0), ups.stride(0), rows.shape[1],
                WIDE=wide(gate), COLUMNS=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
    return dgate, dup


@_swiglu_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _swiglu_backward(gradient, *ctx.saved_tensors)
    return gradients


_swiglu.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _swiglu_kernel(gate, up, out, gate_stride, up_stride, columns, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = _place(columns, COLUMNS)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside).to(WIDE)
    u = tl.load(up + row * up_stride + column, mask=inside).to(WIDE)
    tl.store(out + row * columns + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    gradient, gate, up, dgate, dup, gradient_stride, gate_stride, up_stride, columns,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = _place(columns, COLUMNS)
    inside = column < columns
    d = tl.load(gradient + row * gradient_stride + column, mask=inside).to(WIDE)
    g = tl.load(gate + row * gate_stride + column, mask=inside).to(WIDE)
    u = tl.load(up + row * up_stride + column, mask=inside).to(WIDE)
    sigmoid = tl.sigmoid(g)
    place = row * columns + column
    tl.store(dup + place, (d * g * sigmoid).to(dup.dtype.element_ty), mask=inside)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(dgate + place, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)


@triton.jit
def _place(columns, COLUMNS: tl.constexpr):
    """Return this program's row, and its columns in it."""
    tiles = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS
    return row, start + tl.arange(0, COLUMNS)


def _matrices(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as matrices; as a single row if all are contiguous, so that only one tile is not full."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def _grid(rows: Tensor) -> tuple[int]:
    return (len(rows) * triton.cdiv(rows.shape[1], COLUMNS),)
