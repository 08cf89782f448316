"""Forward pass of FlashAttention-2 in Triton: one program per tile of queries, online softmax over tiles of keys.

Scores are kept in powers of two: s·log2(e)/√d goes into exp2, one multiply-add before the one instruction that the
hardware has. Tiles of keys that every query of the program sees need no mask; those across the diagonal or the end of
the keys come last, and tiles above the diagonal are never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_operands import add_product, as_operand, load_operand, product, transposed
from kernels.attention.triton_tiles import program, store_tile

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward_kernel(
    q, k, v, out, logsumexp,
    q_strides, k_strides, v_strides, out_strides,
    heads, queries, keys, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """out and its log-sum-exp (natural, contiguous) for one tile of queries. `scale` is log2(e)/√d."""
    tiles = tl.cdiv(queries, QUERIES)
    tile, head, batch = program(tiles, heads)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first: short ones fill the gaps at the end
    start = tile * QUERIES
    rows = start + tl.arange(0, QUERIES)
    q_tile = load_operand(q, q_strides, batch, head, start, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION, HOLD)
    accumulator = tl.zeros([QUERIES, WIDTH], tl.float32)
    maximum = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if CAUSAL:
        end = tl.minimum(start + QUERIES, keys)
        free = tl.minimum(start, keys) // KEYS * KEYS
    else:
        end = keys
        free = keys // KEYS * KEYS
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys, scale,
        0, free, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, False,
    )  # fmt: skip
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys, scale,
        free, end, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, True,
    )  # fmt: skip
    store_tile(out, out_strides, batch, head, start, queries, accumulator / total[:, None], QUERIES, HEAD_DIM, WIDTH)
    first = (batch * heads + head).to(tl.int64) * queries
    tl.store(logsumexp + first + rows, (maximum + tl.log2(total)) * LN_2, mask=rows < queries)


@triton.jit
def _attend(
    accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head, rows, keys, scale,
    start, end,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys from `start` to `end`."""
    for first in tl.range(start, end, KEYS):
        k_tile = load_operand(k, k_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        scores = product(q_tile, transposed(k_tile, PRECISION), PRECISION)
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = (columns < keys)[None, :]
            if CAUSAL:
                visible = visible & (columns[None, :] <= rows[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        raised = tl.maximum(maximum, tl.max(scores, 1) * scale)
        base = tl.where(raised == -float("inf"), 0.0, raised)  # as long as a row has seen scores of −∞ only
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        v_tile = load_operand(v, v_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        weights = as_operand(weights, v_tile[0].dtype, PRECISION)
        accumulator = add_product(weights, v_tile, accumulator, PRECISION)
        maximum = raised
    return accumulator, maximum, total
