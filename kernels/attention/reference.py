"""Attention written out: softmax(Q Kᵀ / sqrt(head_dim)) V. The oracle, and the `eager` implementation.

Memory grows with the square of the sequence length: scores and weights are whole tensors. Every device and dtype,
forward and backward by autograd. For an oracle, pass float64 inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ranges import named


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
    with named("scores"):
        scores = _scores(q, k, is_causal, first_query)
    with named("softmax"):
        weights = torch.softmax(scores, dim=-1)
    with named("values"):
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
