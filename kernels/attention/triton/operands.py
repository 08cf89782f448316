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

import triton
import triton.language as tl

PARTS = 3
"""Tiles of bfloat16 whose sum is one of float32."""


@triton.jit
def held(tile, HOLD: tl.constexpr):
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
