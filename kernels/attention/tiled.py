"""FlashAttention-2 in plain PyTorch, tile by tile: the algorithm of flash_triton, for reading and stepping through.

Forward: each tile of queries visits the tiles of keys that it sees, and updates a running maximum and sum of its
softmax.
Backward: the weights are computed again from the log-sum-exp that the forward pass saved. No tensor grows with the
product of the lengths. Sums are in float32, or in float64 for float64 inputs. Every device; slow on all of them.

Method: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1, 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..derivatives import is_batched, is_transformed
from ..registry import FEATURES, Implementation
from .masks import VisibleKeys, visible_keys
from .problem import Band, band_of, check_inputs, check_options, check_shapes
from .reference import repeated

TILE = 128
"""Queries and keys of a tile."""
LEAST = -1e30
"""Below all scores: the place of −∞ where a difference of two would be NaN."""


class _Tiled(torch.autograd.Function):
    """`TiledFlashAttention2` where nothing but a first derivative is asked for."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, options: dict[str, Any] | None = None
    ) -> Tensor:
        """Return the output; save it, the inputs, and the log-sum-exp of each query's scores."""
        ctx.scores = Scores.of(q, k, is_causal, **(options or {}))
        out = torch.empty_like(q)
        logsumexp = q.new_empty(q.shape[:-1], dtype=_sum_dtype(q))
        for rows in _tiles(q.shape[-2]):
            out[..., rows, :], logsumexp[..., rows] = _attend(q, k, v, rows, ctx.scores)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # these gradients, in turn
        if differentiated or is_batched(out_gradient):
            with torch.enable_grad():
                inputs = q, k, v = q.view_as(q), k.view_as(k), v.view_as(v)  # three, also if q is k
                out = _output(q, k, v, ctx.scores)
            leaves = [tensor for tensor in inputs if tensor.requires_grad]
            found = iter(
                torch.autograd.grad(out, leaves, out_gradient, create_graph=differentiated, materialize_grads=True)
            )
            return *(next(found) if tensor.requires_grad else None for tensor in inputs), None, None
        sums = _sum_dtype(q)
        delta = (out_gradient.to(sums) * out.to(sums)).sum(-1)
        dq = torch.zeros_like(q, dtype=sums)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for columns in _tiles(k.shape[-2]):
            k_tile, v_tile = (tensor[..., columns, :].to(sums) for tensor in (k, v))
            dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
            for rows in _tiles(q.shape[-2]):
                if not ctx.scores.meet(rows, columns):
                    continue
                q_tile, do_tile = (tensor[..., rows, :].to(sums) for tensor in (q, out_gradient))
                scores, slope = ctx.scores.tile(q_tile, k_tile, rows, columns)
                # A query that sees no key has the log-sum-exp −∞.
                weights = torch.exp(scores - logsumexp[..., rows, None].clamp(min=LEAST))
                dv_tile += _product(weights.transpose(-2, -1), do_tile)
                dp = _product(do_tile, v_tile.transpose(-2, -1))
                ds = weights * (dp - delta[..., rows, None]) * slope
                dk_tile += _product(ds.transpose(-2, -1), q_tile)
                dq[..., rows, :] += _product(ds, k_tile)
            dk[..., columns, :], dv[..., columns, :] = dk_tile, dv_tile
        return dq.to(q.dtype), dk, dv, None, None


class TiledFlashAttention2(_Tiled):
    """`TiledFlashAttention2.apply(q, k, v, is_causal=False, options=None)`.

    Inputs are (batch, heads, sequence, head_dim) or (batch, sequence, head_dim); k and v have one length, which may
    differ from q's. Returns q's shape. Query i sees keys 0 … i only if `is_causal` (top-left alignment). `options` are
    those of `kernels.flash_attention`, as a dictionary, without `return_lse`.

    Second derivatives, forward mode and torch.func go through the tiles by PyTorch's own derivatives, whose memory
    grows with the product of the lengths.
    """

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, options: dict[str, Any] | None = None) -> Any:
        """Return the output. Raises ValueError: shapes, dtypes, devices or options do not fit together."""
        check_inputs(q, k, v)
        if q.shape[:-2] != k.shape[:-2]:
            raise ValueError(f"expected as many heads of k {tuple(k.shape)} as of q {tuple(q.shape)}")
        if not torch.compiler.is_compiling() and is_transformed():
            return _output(q, k, v, Scores.of(q, k, is_causal, **(options or {})))
        return _Tiled.apply(q, k, v, is_causal, options)  # type: ignore[no-untyped-call]


def _output(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    """Return the output, in operations that PyTorch differentiates."""
    tiles = [_attend(q, k, v, rows, how)[0] for rows in _tiles(q.shape[-2])]
    return torch.cat(tiles, -2).to(q.dtype) if tiles else q.clone()


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Return the matrix product in the factors' type, also under autocast: in its type, the weights of the backward
    pass, which mostly runs outside of it, would differ from those of the forward pass."""
    with nullcontext() if one.is_meta else torch.autocast(one.device.type, enabled=False):
        return one @ other


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, how: Scores) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one tile of queries."""
    q_tile = q[..., rows, :].to(_sum_dtype(q))
    accumulator = torch.zeros_like(q_tile)
    maximum = torch.full_like(q_tile[..., 0], -math.inf)
    total = torch.zeros_like(maximum)
    for columns in _tiles(k.shape[-2]):
        if not how.meet(rows, columns):
            continue
        k_tile, v_tile = (tensor[..., columns, :].to(q_tile.dtype) for tensor in (k, v))
        scores, _ = how.tile(q_tile, k_tile, rows, columns)
        raised = torch.maximum(maximum, scores.amax(-1)).detach()  # results do not depend on it
        base = raised.clamp(min=LEAST)  # as long as a query has seen no key, the maximum is −∞
        weights = torch.exp(scores - base.unsqueeze(-1))
        # The sums so far are relative to the old maximum.
        shrink = torch.exp(maximum - base)
        total = total * shrink + weights.sum(-1)
        accumulator = accumulator * shrink.unsqueeze(-1) + _product(weights, v_tile)
        maximum = raised
    return accumulator / total.masked_fill(total == 0, 1.0).unsqueeze(-1), maximum + torch.log(total)


@dataclass(frozen=True)
class Scores:
    """How scores are computed, and which count."""

    seen: VisibleKeys
    band: Band
    """The same without documents, on the host."""
    scale: float
    softcap: float | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, is_causal: bool, *,
        scale: float | None = None, softcap: float | None = None, window: int | None = None,
        bottom_right: bool = False, document_ends: Tensor | None = None,
    ) -> Scores:  # fmt: skip
        """Return the scores of `flash_attention`'s options. Raises ValueError: they do not fit."""
        check_options(scale, window, softcap)
        queries, keys = q.shape[-2], k.shape[-2]
        band = band_of(queries, keys, is_causal, window=window, bottom_right=bottom_right)
        seen = visible_keys(
            queries, keys, q.device, is_causal, window=window, bottom_right=bottom_right, document_ends=document_ends
        )
        return cls(seen, band, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)

    def meet(self, rows: slice, columns: slice) -> bool:
        """Return False if none of these queries sees any of these keys, whatever the documents are: asking for those
        would wait for the device."""
        lower, upper = self.band
        return (upper is None or columns.start < rows.stop + upper) and (
            lower is None or columns.stop > rows.start + lower
        )

    def tile(self, q_tile: Tensor, k_tile: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | float]:
        """Return a tile of scores, −∞ where a key is hidden; and their slope: how they grow with the product."""
        scores = _product(q_tile, k_tile.transpose(-2, -1)) * self.scale
        slope: Tensor | float = self.scale
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, self.scale * (1 - capped.square())
        hidden = self.seen.hidden(columns, rows)
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf), slope


def _tiles(length: int) -> Iterator[slice]:
    for start in range(0, length, TILE):
        yield slice(start, min(start + TILE, length))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: Any) -> Tensor:
    check_shapes(q, k, v)
    k, v = (repeated(tensor, q) for tensor in (k, v))
    return TiledFlashAttention2.apply(q, k, v, is_causal, options)  # type: ignore[no-any-return]


_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
implementation = Implementation("tiled", _tiled, {"cpu": _DTYPES, "cuda": _DTYPES}, features=FEATURES - {"return_lse"})
