"""Launches the Triton kernels of attention, on tensors that have been checked.

Tensors are (batch, heads, rows, head_dim) with a contiguous last axis and any other strides; numbers per query are
(batch, heads, queries), contiguous, float32. Results are written into tensors that the caller made. `precision` says
how products are done: "ieee" for half precision; "split" (see triton_operands), "tf32x3" or "tf32" for float32. Each
launch takes the tiling that was measured to be best (see triton_tilings) unless it is given one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention import triton_tilings as tilings
from kernels.attention.triton_backward import keys_kernel, queries_kernel, rows_kernel
from kernels.attention.triton_forward import forward_kernel
from kernels.attention.triton_operands import split_tensor
from kernels.attention.triton_tiles import Tiling, descriptor, has_tensor_descriptors

ROW_TILE = 128  # lengths of the backward pass's buffers are multiples of this, and so of every tile of queries


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, precision: str,
    tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Fill `out` and `logsumexp`, from `operands`."""
    batches, heads, queries, head_dim = out.shape
    width = padded_width(head_dim)
    tiling = tiling or tilings.choose((q, k, v), width, precision).forward
    tma = all(has_tensor_descriptors(tensor) for tensor in (q, k, v))
    forward_kernel[(triton.cdiv(queries, tiling.queries) * heads * batches,)](
        _source(q, tiling.queries, width, tma), _source(k, tiling.keys, width, tma),
        _source(v, tiling.keys, width, tma), out, logsumexp,
        q.stride(), k.stride(), v.stride(), out.stride(),
        heads, queries, k.shape[2], math.log2(math.e) / math.sqrt(head_dim),
        GROUP=heads // k.shape[1], HEAD_DIM=head_dim, WIDTH=width, CAUSAL=is_causal, PRECISION=precision, TMA=tma,
        HOLD=tiling.hold, **tiling.launch_options(),
    )  # fmt: skip


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, is_causal: bool, precision: str,
) -> None:  # fmt: skip
    """Fill dq, and dk with dv, where they are given.

    If all are given, it takes the form that was measured to be faster, or two passes for determinism.
    """
    width = padded_width(q.shape[-1])
    exponents, deltas = rows(out, out_gradient, logsumexp, logsumexp_gradient)
    q, k, v, out_gradient = operands(precision, q, k, v, out_gradient)
    one_pass = (
        dq is not None
        and dk is not None
        and tilings.choose((q, k, v), width, precision).prefer_one_pass
        and not torch.are_deterministic_algorithms_enabled()
    )
    dq_sum = exponents.new_zeros((*exponents.shape, width)) if one_pass else None
    if dk is not None and dv is not None:
        keys(q, k, v, out_gradient, exponents, deltas, dk, dv, is_causal, precision, dq_sum)
    if dq is None:
        return
    if dq_sum is None:
        queries(q, k, v, out_gradient, exponents, deltas, dq, is_causal, precision)
    else:
        take_sum(dq_sum, dq)


def take_sum(dq_sum: Tensor, dq: Tensor) -> None:
    """Fill dq from the sum that `keys` added to."""
    length, head_dim = dq.shape[2:]
    torch.mul(dq_sum[:, :, :length, :head_dim], 1 / math.sqrt(head_dim), out=dq)


def operands(precision: str, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors as the other launches take them."""
    if precision != "split":
        return list(tensors)
    return [split_tensor(tensor, padded_width(tensor.shape[-1])) for tensor in tensors]


def rows(
    out: Tensor, out_gradient: Tensor, logsumexp: Tensor, logsumexp_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return per query the numbers that `keys` and `queries` need: exponents and D, each (batch, heads, queries,
    rounded up).
    """
    batches, heads, queries, head_dim = out.shape
    padded = triton.cdiv(queries, ROW_TILE) * ROW_TILE
    exponents, deltas = out.new_empty((2, batches, heads, padded), dtype=torch.float32)
    rows_kernel[(padded // ROW_TILE * heads * batches,)](
        out, out_gradient, logsumexp, logsumexp_gradient, exponents, deltas,
        out.stride(), out_gradient.stride(), heads, queries, padded,
        HEAD_DIM=head_dim, WIDTH=padded_width(head_dim), HAS_LOGSUMEXP_GRADIENT=logsumexp_gradient is not None,
        ROWS=ROW_TILE,
    )  # fmt: skip
    return exponents, deltas


def keys(
    q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor, exponents: Tensor, deltas: Tensor, dk: Tensor, dv: Tensor,
    is_causal: bool, precision: str, dq_sum: Tensor | None = None, tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv, and add √d·dQ to `dq_sum`, of the shape of `exponents` with an axis more, if it is given.

    The first four are `operands`.
    """
    batches, key_heads, length, head_dim = dk.shape
    width, root = padded_width(head_dim), 1 / math.sqrt(head_dim)
    if tiling is None:
        chosen = tilings.choose((q, k, v), width, precision)
        tiling = chosen.keys if dq_sum is None else chosen.one_pass
    assert ROW_TILE % tiling.queries == 0, "buffers of numbers per query end with a tile"
    tma = all(has_tensor_descriptors(tensor) for tensor in (q, k, v, out_gradient))
    keys_kernel[(triton.cdiv(length, tiling.keys) * key_heads * batches,)](
        _source(q, tiling.queries, width, tma), _source(k, tiling.keys, width, tma),
        _source(v, tiling.keys, width, tma), _source(out_gradient, tiling.queries, width, tma),
        exponents, deltas, exponents if dq_sum is None else _source(dq_sum, tiling.queries, width, tma), dk, dv,
        q.stride(), k.stride(), v.stride(), out_gradient.stride(), dk.stride(), dv.stride(),
        q.shape[1], q.shape[2], length, exponents.shape[2], math.log2(math.e) * root, root,
        GROUP=q.shape[1] // key_heads, HEAD_DIM=head_dim, WIDTH=width, CAUSAL=is_causal, ONE_PASS=dq_sum is not None,
        PRECISION=precision, TMA=tma, **tiling.launch_options(),
    )  # fmt: skip


def queries(
    q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor, exponents: Tensor, deltas: Tensor, dq: Tensor,
    is_causal: bool, precision: str, tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Fill dq. The first four are `operands`."""
    batches, heads, length, head_dim = dq.shape
    width, root = padded_width(head_dim), 1 / math.sqrt(head_dim)
    tiling = tiling or tilings.choose((q, k, v), width, precision).queries
    assert ROW_TILE % tiling.queries == 0, "buffers of numbers per query end with a tile"
    tma = all(has_tensor_descriptors(tensor) for tensor in (q, k, v, out_gradient))
    queries_kernel[(triton.cdiv(length, tiling.queries) * heads * batches,)](
        _source(q, tiling.queries, width, tma), _source(k, tiling.keys, width, tma),
        _source(v, tiling.keys, width, tma), _source(out_gradient, tiling.queries, width, tma),
        exponents, deltas, dq,
        q.stride(), k.stride(), v.stride(), out_gradient.stride(), dq.stride(),
        heads, length, k.shape[2], exponents.shape[2], math.log2(math.e) * root, root,
        GROUP=heads // k.shape[1], HEAD_DIM=head_dim, WIDTH=width, CAUSAL=is_causal, PRECISION=precision, TMA=tma,
        HOLD=tiling.hold, **tiling.launch_options(),
    )  # fmt: skip


def padded_width(head_dim: int) -> int:
    """Columns of a tile: the head dimension rounded up to a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _source(tensor: Tensor, rows: int, width: int, tma: bool) -> Any:
    return descriptor(tensor, rows, width) if tma else tensor
