"""Launches the Triton kernels of attention, on tensors that have been checked.

Tensors are (batch, heads, rows, head_dim) with a contiguous last axis and any other strides; numbers per query are
(batch, heads, queries), contiguous, float32. Results are written into the caller's tensors. `precision` determines how
products are computed: "ieee" for half precision; "split" (see `operands`), "tf32x3" or "tf32" for float32. Each launch
uses the tiling that was measured to be fastest (see `tilings`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...launching import Address, Launch, Window
from ...versions import is_verified
from ..problem import band_of
from . import tilings
from .inputs import has_tensor_descriptors
from .kernels import (
    finish_kernel,
    forward_kernel,
    keys_kernel,
    queries_kernel,
    rows_kernel,
    split_kernel,
)
from .operands import PARTS
from .tilings import Tiling, padded_width
from .visible import bounds_kernel

ROW_TILE = 128
"""Lengths of the backward pass's buffers are multiples of this, and thus of every tile of queries."""
ROW_ELEMENTS = 8192
"""Elements of a tile of the kernels that read rows: two such tiles fit into four warps' registers."""
SPLIT_ROWS = 32
"""Rows of a tile of the kernel that splits float32 into parts."""
BOUNDS_TOKENS, BOUNDS_ENDS = 128, 64
"""Sizes of a tile of the kernel that finds the documents' bounds."""
LAUNCHES = 256
"""Launches of each kernel that are kept: one for each set of shapes and strides."""


class Kind(NamedTuple):
    """The properties of a tensor on which a launch depends."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def kind(tensor: Tensor) -> Kind:
    return Kind(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Scoring(NamedTuple):
    """How scores become weights, except for documents, which are a tensor: all that kernels need to know of it."""

    is_causal: bool
    """The plain causal mask, aligned top-left; `lower` and `upper` then are None."""
    lower: int | None
    upper: int | None
    """The visible diagonals of another mask, as in `Band`."""
    scale: float
    softcap: float | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, is_causal: bool, *, scale: float | None = None, window: int | None = None,
        softcap: float | None = None, bottom_right: bool = False, documents: bool = False,
    ) -> Scoring:  # fmt: skip
        """Return the scoring of queries and keys (…, rows, head_dim). With documents, all bounds are explicit."""
        lower, upper = band_of(q.shape[-2], k.shape[-2], is_causal, window=window, bottom_right=bottom_right)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        is_plain = (lower, upper) == (None, 0) and not documents
        return cls(is_plain, lower, None if is_plain else upper, scale, softcap)

    @property
    def factor(self) -> float:
        """What the kernels call `scale`."""
        return math.log2(math.e) * (self.scale if self.softcap is None else self.softcap)

    @property
    def inner(self) -> float | None:
        """What the kernels call `inner`."""
        return None if self.softcap is None else self.scale / self.softcap


def document_bounds(document_ends: Tensor, tokens: int) -> Tensor:
    """Return where each token's document starts and stops, (2, tokens), int32, of `kernels.attention.masks`."""
    bounds = document_ends.new_empty((2, tokens))
    _bounds_launch(tokens, document_ends.shape[0])((document_ends.contiguous(), bounds))
    return bounds


@functools.lru_cache(maxsize=LAUNCHES)
def _bounds_launch(tokens: int, documents: int) -> Launch:
    return Launch(
        bounds_kernel, triton.cdiv(tokens, BOUNDS_TOKENS), (Address(0), Address(1), documents, tokens),
        {"TOKENS": BOUNDS_TOKENS, "ENDS": BOUNDS_ENDS},
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scoring: Scoring, precision: str,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` and `logsumexp`, from `operands`."""
    tiling = tilings.choose(q.device, padded_width(out.shape[-1]), precision).forward
    tma = _through_descriptors(q, k, v)
    launch = _forward_launch(kind(q), kind(k), kind(v), kind(out), scoring, bounds is not None, precision, tma, tiling)
    launch((q, k, v, out, logsumexp, *some(bounds)))


@functools.lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    q: Kind, k: Kind, v: Kind, out: Kind, scoring: Scoring, documents: bool, precision: str, tma: bool, tiling: Tiling
) -> Launch:
    batches, heads, queries, head_dim = out.shape
    width = padded_width(head_dim)
    return Launch(
        forward_kernel,
        triton.cdiv(queries, tiling.queries) * heads * batches,
        (
            source(0, q, tiling.queries, width, tma), source(1, k, tiling.keys, width, tma),
            source(2, v, tiling.keys, width, tma), Address(3), Address(4),
            q.strides, k.strides, v.strides, out.strides,
            heads, queries, k.shape[2], scoring.factor,
            scoring.inner, scoring.lower, scoring.upper, Address(5) if documents else None,
        ),
        {
            "GROUP": heads // k.shape[1], "HEAD_DIM": head_dim, "WIDTH": width, "CAUSAL": scoring.is_causal,
            "PRECISION": precision, "TMA": tma, "HOLD": tiling.hold and is_verified(), **tiling.launch_options(),
        },
    )  # fmt: skip


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, scoring: Scoring, precision: str,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of which dq or both dk and dv may be None.

    With all three, it uses the form that was measured to be faster, or two passes for determinism.
    """
    width = padded_width(q.shape[-1])
    q_operand, k_operand, v_operand = operands(precision, q, k, v)
    one_pass = (
        dq is not None
        and dk is not None
        and tilings.choose(q_operand.device, width, precision).prefer_one_pass
        and not torch.are_deterministic_algorithms_enabled()
    )
    exponents, deltas, dq_sum = rows(out, out_gradient, logsumexp, logsumexp_gradient, add_up=one_pass)
    (out_gradient,) = operands(precision, out_gradient)
    inputs = q_operand, k_operand, v_operand, out_gradient, exponents, deltas
    if dk is not None and dv is not None:
        keys(*inputs, dk, dv, scoring, precision, dq_sum, bounds=bounds)
    if dq is None:
        return
    if dq_sum is None:
        queries(*inputs, dq, scoring, precision, bounds=bounds)
    else:
        finish_dq(dq_sum, dq, scoring.scale)


def finish_dq(dq_sum: Tensor, dq: Tensor, scale: float) -> None:
    """Fill dq from the sum that `keys` computed."""
    _finish_launch(kind(dq), kind(dq_sum), scale)((dq_sum, dq))


@functools.lru_cache(maxsize=LAUNCHES)
def _finish_launch(dq: Kind, dq_sum: Kind, scale: float) -> Launch:
    batches, heads, queries, head_dim = dq.shape
    width = dq_sum.shape[-1]
    size = rows_per_program(width)
    return Launch(
        finish_kernel,
        triton.cdiv(queries, size) * heads * batches,
        (Address(0), Address(1), dq.strides, heads, queries, dq_sum.shape[2], scale),
        {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": size, "OVERLAP": False, "SUM": width, "BY_THREAD": False},
    )


def operands(precision: str, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the form that the other launches need: split into parts if the precision is "split"."""
    if precision != "split":
        return list(tensors)
    return [_split(tensor, padded_width(tensor.shape[-1])) for tensor in tensors]


def _split(tensor: Tensor, width: int) -> Tensor:
    """Split a float32 tensor (batch, heads, rows, head_dim) into parts (batch · 3, heads, rows, head_dim) in bfloat16.

    Rows are padded with zeros to a multiple of 8 columns, since tensor descriptors need that.
    """
    batches, heads, rows, head_dim = tensor.shape
    columns = triton.cdiv(head_dim, 8) * 8
    parts = tensor.new_empty((PARTS * batches, heads, rows, columns), dtype=torch.bfloat16)
    split_kernel[(triton.cdiv(rows, SPLIT_ROWS) * heads * batches,)](
        tensor, parts, tensor.stride(), parts.stride(), heads, rows,
        HEAD_DIM=head_dim, COLUMNS=columns, WIDTH=width, ROWS=SPLIT_ROWS,
    )  # fmt: skip
    return parts


def rows(
    out: Tensor, out_gradient: Tensor, logsumexp: Tensor, logsumexp_gradient: Tensor | None, *, add_up: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the numbers per query that `keys` and `queries` need: exponents and D, each (batch, heads, queries rounded
    up). With `add_up`, for one pass, also return zeros with one more axis, for the sum of dQ.
    """
    batches, heads, queries, head_dim = out.shape
    padded = triton.cdiv(queries, ROW_TILE) * ROW_TILE
    exponents, deltas = out.new_empty((2, batches, heads, padded), dtype=torch.float32).unbind()
    width = padded_width(head_dim)
    dq_sum = out.new_empty((batches, heads, padded, width), dtype=torch.float32) if add_up else None
    launch = _rows_launch(kind(out), kind(out_gradient), logsumexp_gradient is not None, add_up)
    launch((
        out, out_gradient, logsumexp, logsumexp if logsumexp_gradient is None else logsumexp_gradient,
        exponents, deltas, exponents if dq_sum is None else dq_sum,
    ))  # fmt: skip
    return exponents, deltas, dq_sum


@functools.lru_cache(maxsize=LAUNCHES)
def _rows_launch(out: Kind, out_gradient: Kind, has_logsumexp_gradient: bool, clear: bool) -> Launch:
    batches, heads, queries, head_dim = out.shape
    padded, width = triton.cdiv(queries, ROW_TILE) * ROW_TILE, padded_width(head_dim)
    size = rows_per_program(width)
    return Launch(
        rows_kernel,
        padded // size * heads * batches,
        (*map(Address, range(7)), None, out.strides, out_gradient.strides, heads, queries, padded),
        {
            "HEAD_DIM": head_dim, "WIDTH": width, "HAS_LOGSUMEXP_GRADIENT": has_logsumexp_gradient, "CLEAR": clear,
            "ROWS": size, "OVERLAP": False, "SUM": width,
        },
    )  # fmt: skip


def keys(
    q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor, exponents: Tensor, deltas: Tensor, dk: Tensor, dv: Tensor,
    scoring: Scoring, precision: str, dq_sum: Tensor | None = None, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv. Add dQ/scale to `dq_sum`, of `exponents`' shape with one more axis, unless it is None.

    The first four arguments are `operands`.
    """
    chosen = tilings.choose(q.device, padded_width(dk.shape[-1]), precision, scoring.softcap is not None)
    tiling = chosen.keys if dq_sum is None else chosen.one_pass
    tma = _through_descriptors(q, k, v, out_gradient)
    launch = _keys_launch(
        kind(q), kind(k), kind(v), kind(out_gradient), kind(dk), kind(dv), exponents.shape[2], dq_sum is not None,
        scoring, bounds is not None, precision, tma, tiling,
    )  # fmt: skip
    dq_sum = exponents if dq_sum is None else dq_sum
    launch((q, k, v, out_gradient, exponents, deltas, dq_sum, dk, dv, *some(bounds)))


@functools.lru_cache(maxsize=LAUNCHES)
def _keys_launch(
    q: Kind, k: Kind, v: Kind, out_gradient: Kind, dk: Kind, dv: Kind, padded: int, one_pass: bool,
    scoring: Scoring, documents: bool, precision: str, tma: bool, tiling: Tiling,
) -> Launch:  # fmt: skip
    batches, key_heads, length, head_dim = dk.shape
    heads, queries = q.shape[1:3]
    width = padded_width(head_dim)
    assert ROW_TILE % tiling.queries == 0, "buffers of numbers per query end with a tile"
    dq_sum: Any = Address(6)
    if one_pass and tma:
        shape = (batches, heads, padded, width)
        dq_sum = Window.of(6, shape, _contiguous(shape), (1, 1, tiling.queries, width))
    return Launch(
        keys_kernel,
        triton.cdiv(length, tiling.keys) * key_heads * batches,
        (
            source(0, q, tiling.queries, width, tma), source(1, k, tiling.keys, width, tma),
            source(2, v, tiling.keys, width, tma), source(3, out_gradient, tiling.queries, width, tma),
            Address(4), Address(5), dq_sum, Address(7), Address(8),
            q.strides, k.strides, v.strides, out_gradient.strides, dk.strides, dv.strides,
            heads, queries, length, padded, scoring.factor, scoring.scale,
            scoring.inner, scoring.lower, scoring.upper, Address(9) if documents else None,
        ),
        {
            "GROUP": heads // key_heads, "HEAD_DIM": head_dim, "WIDTH": width, "CAUSAL": scoring.is_causal,
            "ONE_PASS": one_pass, "PRECISION": precision, "TMA": tma, **tiling.launch_options(),
        },
    )  # fmt: skip


def queries(
    q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor, exponents: Tensor, deltas: Tensor, dq: Tensor,
    scoring: Scoring, precision: str, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dq. The first four arguments are `operands`."""
    tiling = tilings.choose(q.device, padded_width(dq.shape[-1]), precision).queries
    tma = _through_descriptors(q, k, v, out_gradient)
    launch = _queries_launch(
        kind(q), kind(k), kind(v), kind(out_gradient), kind(dq), exponents.shape[2],
        scoring, bounds is not None, precision, tma, tiling,
    )  # fmt: skip
    launch((q, k, v, out_gradient, exponents, deltas, dq, *some(bounds)))


@functools.lru_cache(maxsize=LAUNCHES)
def _queries_launch(
    q: Kind, k: Kind, v: Kind, out_gradient: Kind, dq: Kind, padded: int,
    scoring: Scoring, documents: bool, precision: str, tma: bool, tiling: Tiling,
) -> Launch:  # fmt: skip
    batches, heads, length, head_dim = dq.shape
    width = padded_width(head_dim)
    assert ROW_TILE % tiling.queries == 0, "buffers of numbers per query end with a tile"
    return Launch(
        queries_kernel,
        triton.cdiv(length, tiling.queries) * heads * batches,
        (
            source(0, q, tiling.queries, width, tma), source(1, k, tiling.keys, width, tma),
            source(2, v, tiling.keys, width, tma), source(3, out_gradient, tiling.queries, width, tma),
            Address(4), Address(5), Address(6),
            q.strides, k.strides, v.strides, out_gradient.strides, dq.strides,
            heads, length, k.shape[2], padded, scoring.factor, scoring.scale,
            scoring.inner, scoring.lower, scoring.upper, Address(7) if documents else None,
        ),
        {
            "GROUP": heads // k.shape[1], "HEAD_DIM": head_dim, "WIDTH": width, "CAUSAL": scoring.is_causal,
            "PRECISION": precision, "TMA": tma, "HOLD": tiling.hold and is_verified(), **tiling.launch_options(),
        },
    )  # fmt: skip


def rows_per_program(width: int) -> int:
    """Return the rows of a tile of `rows_kernel` and `finish_kernel`; a divisor of `ROW_TILE`."""
    return min(ROW_TILE, ROW_ELEMENTS // width)


def some(bounds: Tensor | None) -> tuple[Tensor, ...]:
    """Return the last tensors of a launch: the documents' bounds, if there are documents."""
    return () if bounds is None else (bounds,)


def _through_descriptors(*tensors: Tensor) -> bool:
    return all(has_tensor_descriptors(tensor) for tensor in tensors)


def source(place: int, tensor: Kind, rows: int, width: int, tma: bool) -> Address | Window:
    """Return the argument from which a kernel reads tiles of a tensor, each of `rows` rows."""
    return Window.of(place, tensor.shape, tensor.strides, (1, 1, rows, width)) if tma else Address(place)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
