"""Operands of products: a tile as it is, or, for float32 without loss, three tiles of bfloat16 whose sum it is.

Tensor cores have no float32. A float32 number is the sum of three bfloat16 numbers, of 8 bits each; of the nine
products of two such sums six matter, and the other three are below 2⁻²⁴ of the whole. Operands are split in memory
once, before the kernels that read them many times; splitting them in registers needs more registers than there are.
Infinities, and numbers above 3.39e38, become NaN; below 1e-33, digits are lost.

After Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019), section III.

In the kernels, an operand is a tuple of tiles, of one or of three; `PRECISION` tells which: "split" for three parts, or
what Triton's dot calls its input_precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.triton_tiles import load_tile, program, store_tile

PARTS = 3
SPLIT_ROWS = 32


@triton.jit
def load_operand(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of a tensor or, if PRECISION is "split", of each part, as `split_tensor` lays them out."""
    if PRECISION == "split":
        first = load_tile(source, strides, 3 * batch, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        second = load_tile(source, strides, 3 * batch + 1, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        third = load_tile(source, strides, 3 * batch + 2, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        return first, second, third
    else:  # noqa: RET505 - Triton compiles one of two branches, and nothing behind a return
        tile = load_tile(source, strides, batch, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        return (_held(tile, HOLD),)


@triton.jit
def _held(tile, HOLD: tl.constexpr):
    """Return the tile; if HOLD, in registers, since a product otherwise reads its left operand from shared memory each
    time.

    Triton reads from shared memory if the operand comes straight from a load. A move in between prevents that, and
    compiles to no instruction.
    """
    if HOLD:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, True, 32 // tile.dtype.primitive_bitwidth
        )
    return tile


@triton.jit
def as_operand(values, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return float32 results as a product's operand: in parts, or rounded to `dtype`."""
    if PRECISION == "split":
        return split(values)
    else:  # noqa: RET505
        return (values.to(dtype),)


@triton.jit
def transposed(operand, PRECISION: tl.constexpr):
    """The operand's transpose."""
    if PRECISION == "split":
        return operand[0].T, operand[1].T, operand[2].T
    else:  # noqa: RET505
        return (operand[0].T,)


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """left @ right, in float32. With parts, the small products are added first."""
    if PRECISION == "split":
        result = tl.dot(left[2], right[0])
        result = tl.dot(left[1], right[1], result)
        result = tl.dot(left[0], right[2], result)
        result = tl.dot(left[1], right[0], result)
        result = tl.dot(left[0], right[1], result)
        return tl.dot(left[0], right[0], result)
    else:  # noqa: RET505
        return tl.dot(left[0], right[0], input_precision=PRECISION)


@triton.jit
def add_product(left, right, accumulator, PRECISION: tl.constexpr):
    """accumulator + left @ right.

    Tensor cores cut a sum where they should round it, always towards zero. In float32 that would show: after the six
    products of each of 16 384 keys, the output is too small by 10⁻⁴. So sums of parts are added outside of them.
    """
    if PRECISION == "split":
        return accumulator + product(left, right, PRECISION)
    else:  # noqa: RET505
        return tl.dot(left[0], right[0], accumulator, input_precision=PRECISION)


@triton.jit
def split(values):
    """Three tiles of bfloat16 whose sum is the float32 tile `values`: each is the rest, rounded."""
    first = values.to(tl.bfloat16)
    rest = values - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    return first, second, third


def split_tensor(tensor: Tensor, width: int) -> Tensor:
    """A float32 tensor's parts: (batch, heads, rows, head_dim) to (batch · 3, heads, rows, head_dim) in bfloat16.

    Rows are padded with zeros to a multiple of 8 columns, what tensor descriptors need.
    """
    batches, heads, rows, head_dim = tensor.shape
    columns = triton.cdiv(head_dim, 8) * 8
    parts = tensor.new_empty((PARTS * batches, heads, rows, columns), dtype=torch.bfloat16)
    split_kernel[(triton.cdiv(rows, SPLIT_ROWS) * heads * batches,)](
        tensor, parts, tensor.stride(), parts.stride(), heads, rows,
        HEAD_DIM=head_dim, COLUMNS=columns, WIDTH=width, ROWS=SPLIT_ROWS,
    )  # fmt: skip
    return parts


@triton.jit
def split_kernel(
    tensor, parts, strides, part_strides, heads, rows,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The parts of one tile of rows."""
    tile, head, batch = program(tl.cdiv(rows, ROWS), heads)
    start = tile * ROWS
    first, second, third = split(load_tile(tensor, strides, batch, head, start, rows, ROWS, HEAD_DIM, WIDTH, False))
    store_tile(parts, part_strides, 3 * batch, head, start, rows, first, ROWS, COLUMNS, WIDTH)
    store_tile(parts, part_strides, 3 * batch + 1, head, start, rows, second, ROWS, COLUMNS, WIDTH)
    store_tile(parts, part_strides, 3 * batch + 2, head, start, rows, third, ROWS, COLUMNS, WIDTH)
