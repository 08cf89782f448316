"""Computes attention's right output and gradients, at any length: the reference in float64, some queries at a time.

The whole score matrix of a long sequence fits into no memory. In the forward pass the queries' rows are independent,
and gradients of keys and values are sums over queries, so the parts give the exact whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.reference import attention

SCORE_BYTES = 256 << 20
"""Size of one part's scores; about six tensors of it live at a time."""


class Oracle(NamedTuple):
    """The output, and the gradients of queries, keys and values (empty without `grad_out`), in float64."""

    out: Tensor
    gradients: tuple[Tensor, ...]


def oracle(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, is_causal: bool = False) -> Oracle:
    """Compute attention's results for these inputs in float64.

    Args:
        q: Queries (…, queries, head_dim), of any dtype; the oracle takes their rounded values.
        k: Keys (…, keys, head_dim).
        v: Values (…, keys, head_dim).
        grad_out: The output's gradient (…, queries, head_dim); None: no gradients.
        is_causal: Query i sees keys 0 … i only.
    """
    q, k, v = (tensor.detach().double() for tensor in (q, k, v))
    queries, keys = q.shape[-2], k.shape[-2]
    rows_at_once = max(1, SCORE_BYTES // (8 * keys * q.shape[:-2].numel()))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float64, device=q.device)
    gradients = tuple(torch.zeros_like(tensor) for tensor in (q, k, v)) if grad_out is not None else ()
    for start in range(0, queries, rows_at_once):
        rows = slice(start, min(start + rows_at_once, queries))
        seen = slice(0, min(keys, rows.stop) if is_causal else keys)
        places = ((..., rows, slice(None)), (..., seen, slice(None)), (..., seen, slice(None)))
        parts = [
            tensor[place].requires_grad_(grad_out is not None) for tensor, place in zip((q, k, v), places, strict=True)
        ]
        with torch.set_grad_enabled(grad_out is not None):
            part = attention(parts[0], parts[1], parts[2], is_causal, first_query=start)
        out[..., rows, :] = part.detach()
        if grad_out is not None:
            found = torch.autograd.grad(part, parts, grad_out[..., rows, :].double())
            for gradient, place, share in zip(gradients, places, found, strict=True):
                gradient[place] += share
    return Oracle(out, gradients)
