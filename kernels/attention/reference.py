"""Attention written out: softmax(Q Kᵀ / sqrt(head_dim)) V. The oracle, and the `eager` implementation.

Memory grows with the square of the sequence length: scores and weights are whole tensors. Every device and dtype,
forward and backward by autograd. For an oracle, pass float64 inputs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, first_query: int = 0) -> Tensor:
    """Softmax attention.

    Args:
        q: Queries (…, queries, head_dim).
        k: Keys (…, keys, head_dim).
        v: Values (…, keys, head_dim).
        is_causal: Query i sees keys 0 … i only (top-left alignment).
        first_query: Number of the first of these queries, where q is a part of a longer sequence.

    Returns:
        (…, queries, head_dim).
    """
    with _range("scores", q):
        scores = _scores(q, k, is_causal, first_query)
    with _range("softmax", q):
        weights = torch.softmax(scores, dim=-1)
    with _range("values", q):
        return weights @ v


def attention_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores: (…, queries, head_dim) and (…, queries)."""
    scores = _scores(q, k, is_causal)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


def _scores(q: Tensor, k: Tensor, is_causal: bool, first_query: int = 0) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + first_query)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _range(name: str, tensor: Tensor) -> AbstractContextManager[None]:
    # A compiler would break the graph at an NVTX call, and fuses the three anyway.
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return nullcontext()
    return torch.cuda.nvtx.range(name)
