"""Attention written out: softmax(Q Kᵀ / sqrt(head_dim)) V. The oracle, and the `eager` implementation.

Memory grows with the square of the sequence length: scores and weights are whole tensors. Every device and dtype,
forward and backward by autograd. For an oracle, pass float64 inputs.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..ranges import named
from .masks import visible_keys
from .problem import check_inputs, check_options


def attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    document_ends: Tensor | None = None, bottom_right: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention, with the options of `kernels.flash_attention`.

    Args:
        q: Queries (…, heads, queries, head_dim).
        k: Keys (…, key heads, keys, head_dim); `heads` is a multiple of `key heads`. Or both without heads.
        v: Values (…, key heads, keys, value_dim).
        is_causal: Query i sees keys 0 … i only (top-left alignment).
        scale, window, softcap, document_ends, bottom_right, return_lse: See `AttentionProblem`.

    Returns:
        (…, queries, value_dim); with `return_lse` also the log-sum-exps (…, queries).

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit together.
    """
    check_inputs(q, k, v, any_width=True)
    check_options(scale, window, softcap)
    queries, keys = q.shape[-2], k.shape[-2]
    seen = visible_keys(
        queries, keys, q.device, is_causal, window=window, bottom_right=bottom_right, document_ends=document_ends
    )
    hidden = seen.hidden(slice(0, keys))
    return attend(q, k, v, hidden, seen.may_be_none, scale=scale, softcap=softcap, return_lse=return_lse)


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, may_be_none: bool, *,
    scale: float | None, softcap: float | None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`attention` with a mask (queries, keys), which is true where a key is hidden from a query, or None.

    `may_be_none` tells whether it hides all keys from some queries.
    """
    with named("scores"):
        k, v = (repeated(tensor, q) for tensor in (k, v))
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
    empty = hidden.all(-1, keepdim=True) if hidden is not None and may_be_none else None
    if empty is not None:  # a softmax of −∞ alone would be NaN
        scores = scores.masked_fill(empty, 0.0)
    with named("softmax"):
        weights = torch.softmax(scores, dim=-1)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    with named("values"):
        out = weights @ v
    if not return_lse:
        return out
    sums = scores if scores.dtype == torch.float64 else scores.float()
    logsumexp = torch.logsumexp(sums, dim=-1)
    return out, logsumexp if empty is None else logsumexp.masked_fill(empty.squeeze(-1), -math.inf)


def repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """Keys or values with a head for each head of the queries."""
    if tensor.dim() < 4 or tensor.shape[-3] == q.shape[-3]:
        return tensor
    return tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3)
