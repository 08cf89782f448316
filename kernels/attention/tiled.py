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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.registry import Implementation

TILE = 128
"""Queries and keys of a tile."""


class TiledFlashAttention2(torch.autograd.Function):
    """`TiledFlashAttention2.apply(q, k, v, is_causal=False)`.

    Inputs are (batch, heads, sequence, head_dim) or (batch, sequence, head_dim); k and v have one length, which may
    differ from q's. Returns q's shape. Query i sees keys 0 … i only if `is_causal` (top-left alignment).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return the output; save it, the inputs, and the log-sum-exp of each query's scores."""
        out = torch.empty_like(q)
        logsumexp = q.new_empty(q.shape[:-1], dtype=_sum_dtype(q))
        for rows in _tiles(q.shape[-2]):
            out[..., rows, :], logsumexp[..., rows] = _attend(q, k, v, rows, is_causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, out, logsumexp = ctx.saved_tensors
        sums = _sum_dtype(q)
        delta = (out_gradient.to(sums) * out.to(sums)).sum(-1)
        dq = torch.zeros_like(q, dtype=sums)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for columns in _tiles(k.shape[-2]):
            k_tile, v_tile = (tensor[..., columns, :].to(sums) for tensor in (k, v))
            dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
            for rows in _tiles(q.shape[-2]):
                if ctx.is_causal and rows.stop <= columns.start:
                    continue
                q_tile, do_tile = (tensor[..., rows, :].to(sums) for tensor in (q, out_gradient))
                scores = _scores(q_tile, k_tile, rows, columns, ctx.is_causal)
                weights = torch.exp(scores - logsumexp[..., rows, None])
                dv_tile += weights.transpose(-2, -1) @ do_tile
                dp = do_tile @ v_tile.transpose(-2, -1)
                ds = weights * (dp - delta[..., rows, None]) / math.sqrt(q.shape[-1])
                dk_tile += ds.transpose(-2, -1) @ q_tile
                dq[..., rows, :] += ds @ k_tile
            dk[..., columns, :], dv[..., columns, :] = dk_tile, dv_tile
        return dq.to(q.dtype), dk, dv, None


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one tile of queries."""
    q_tile = q[..., rows, :].to(_sum_dtype(q))
    accumulator = torch.zeros_like(q_tile)
    maximum = torch.full_like(q_tile[..., 0], -math.inf)
    total = torch.zeros_like(maximum)
    for columns in _tiles(min(k.shape[-2], rows.stop) if is_causal else k.shape[-2]):
        k_tile, v_tile = (tensor[..., columns, :].to(q_tile.dtype) for tensor in (k, v))
        scores = _scores(q_tile, k_tile, rows, columns, is_causal)
        raised = torch.maximum(maximum, scores.amax(-1))
        weights = torch.exp(scores - raised.unsqueeze(-1))
        # The sums so far are relative to the old maximum.
        shrink = torch.exp(maximum - raised)
        total = total * shrink + weights.sum(-1)
        accumulator = accumulator * shrink.unsqueeze(-1) + weights @ v_tile
        maximum = raised
    return accumulator / total.unsqueeze(-1), maximum + torch.log(total)


def _scores(q_tile: Tensor, k_tile: Tensor, rows: slice, columns: slice, is_causal: bool) -> Tensor:
    scores = q_tile @ k_tile.transpose(-2, -1) / math.sqrt(q_tile.shape[-1])
    if is_causal and columns.stop - 1 > rows.start:  # other tiles lie below the diagonal
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        column = torch.arange(columns.start, columns.stop, device=scores.device)
        scores = scores.masked_fill(column > row.unsqueeze(-1), -math.inf)
    return scores


def _tiles(length: int) -> Iterator[slice]:
    for start in range(0, length, TILE):
        yield slice(start, min(start + TILE, length))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return TiledFlashAttention2.apply(q, k, v, is_causal)  # type: ignore[no-any-return, no-untyped-call]


_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
implementation = Implementation("tiled", _tiled, {"cpu": _DTYPES, "cuda": _DTYPES})
