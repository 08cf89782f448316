"""Rotary position embeddings (Su et al., 2021) in Triton: each pair (x[2i], x[2i+1]) turned by its position's angle.

Both passes read x and write the result once; the backward pass turns the gradient by the negative angle.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .derivatives import register
from .interpreted import patch_interpreter
from .rows import check_device, check_floating, check_rows, wide

patch_interpreter()

TILE = 1024
"""Elements of a program."""
WARPS = 4
MAX_HEAD_DIM = 4096
_NO_GRADIENT = "cos and sin get no gradient: detach them"


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i+1]) by its position's angle.

    Args:
        x: (…, sequence, head_dim), floating point, on a CUDA device. Strides are arbitrary; heads and positions may be
            swapped in memory.
        cos: (sequence, head_dim / 2), cosines of the angles, floating point. They get no gradient.
        sin: Their sines.

    Returns:
        Of x's shape and dtype. If x is (batch, heads, sequence, head_dim) with heads next to head_dim in memory, so is
        the result.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or cos or sin require a gradient.
        NoDerivative: in forward mode and in torch.func.grad. Second derivatives are right.
    """
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(_NO_GRADIENT)
    out: Tensor = _rope(x, cos, sin, False)
    return out


@torch.library.custom_op("flopwatch::rope", mutates_args=())
def _rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    out: Tensor = _result(x, cos, sin, inverse)
    check_device(x.device, _NAMES[1])
    if x.numel():
        turned, result = _four_axes(x), _four_axes(out)
        batch, heads, sequence, head_dim = turned.shape
        rows, width = batch * heads * sequence, triton.next_power_of_2(head_dim)
        check_rows(rows)
        tile_rows = max(1, TILE // width)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _rope_kernel[(triton.cdiv(rows, tile_rows),)](
                turned, cos.contiguous(), sin.contiguous(), result, *turned.stride()[:3], *result.stride()[:3],
                rows, heads, sequence, head_dim,
                INVERSE=inverse, WIDE=wide(x), ROWS=tile_rows, PAIRS=width // 2, num_warps=WARPS,
            )  # fmt: skip
    return out


@_rope.register_fake
def _result(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    check_floating(x, cos, sin)
    angles = (x.shape[-2], x.shape[-1] // 2) if x.dim() > 1 else ()
    if not angles or x.shape[-1] % 2 or x.shape[-1] > MAX_HEAD_DIM or cos.shape != angles or sin.shape != angles:
        raise ValueError(
            f"expected x (…, sequence, head_dim), with an even head_dim up to {MAX_HEAD_DIM}, and cos and sin "
            f"(sequence, head_dim / 2), not {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:  # which vmap hides from the forward pass
        raise ValueError(_NO_GRADIENT)
    return _rope(gradient, *ctx.saved_tensors, not ctx.inverse), None, None, None


_NAMES = "rope", "kernels.operations.rotate"
register(_rope, *_NAMES, _differentiate, _save)


@triton.jit
def _rope_kernel(
    x, cos, sin, out,
    x_batch, x_head, x_position, out_batch, out_head, out_position, rows, heads, sequence, head_dim,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows are numbered batch by batch, position by position, head by head: so heads share a position's angles."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = (row % heads).to(tl.int64)
    position = (row // heads % sequence).to(tl.int64)
    batch = (row // heads // sequence).to(tl.int64)
    column, pair, pairs = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS), head_dim // 2
    inside = (row < rows)[:, None] & (column < head_dim)[None, :]
    place = batch * x_batch + head * x_head + position * x_position
    x_tile = tl.load(x + place[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
    even, odd = tl.split(tl.reshape(x_tile, [ROWS, PAIRS, 2]))
    angle, known = position[:, None] * pairs + pair[None, :], (row < rows)[:, None] & (pair < pairs)[None, :]
    c = tl.load(cos + angle, mask=known, other=0.0).to(WIDE)
    s = tl.load(sin + angle, mask=known, other=0.0).to(WIDE)
    if INVERSE:
        s = -s
    turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, 2 * PAIRS])
    place = batch * out_batch + head * out_head + position * out_position
    tl.store(out + place[:, None] + column[None, :], turned.to(out.dtype.element_ty), mask=inside)


def _four_axes(x: Tensor) -> Tensor:
    """x as (batch, heads, sequence, head_dim) with a contiguous last axis; a view if its strides allow one."""
    x = x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if x.stride(-1) == 1 else x.contiguous()
