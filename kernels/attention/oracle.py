"""Computes attention's right output and gradients, at any length: the reference in float64, some queries at a time.

The score matrix of a long sequence does not fit into memory. In the forward pass the queries' rows are independent, and
gradients of keys and values are sums over queries, so computing in parts is exact. The reference is also computed in
the inputs' dtype: its error determines how large an implementation's error may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.reference import attention
from kernels.tolerance import Error, error, limits_beside_plain

SCORE_BYTES = 256 << 20
"""Size of one part's scores; about six tensors of it live at a time."""


class Oracle(NamedTuple):
    """The output, and the gradients of queries, keys and values (empty without `grad_out`), in float64."""

    out: Tensor
    gradients: tuple[Tensor, ...]
    limits: tuple[Error, ...]
    """Largest errors of a right output, and of right gradients."""


def oracle(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, is_causal: bool = False) -> Oracle:
    """Compute attention's results for these inputs in float64.

    Args:
        q: Queries (…, queries, head_dim), of any dtype; the oracle takes their rounded values.
        k: Keys (…, keys, head_dim).
        v: Values (…, keys, head_dim).
        grad_out: The output's gradient (…, queries, head_dim); None: no gradients.
        is_causal: Query i sees keys 0 … i only.
    """
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    right = _in_parts(
        [tensor.double() for tensor in (q, k, v)], None if grad_out is None else grad_out.double(), is_causal
    )
    plain = _in_parts([q, k, v], grad_out, is_causal)
    return Oracle(right[0], right[1:], limits(plain, right, is_causal))


def limits(plain: Sequence[Tensor], right: Sequence[Tensor], is_causal: bool) -> tuple[Error, ...]:
    """Return the largest allowed errors of results.

    Gradients of q and k are differences of two terms. For inputs of size 1, each term has about the size 1 divided by
    the number of keys that a query sees. If queries see few keys, the terms nearly cancel: FlashAttention computes the
    subtracted term, D, from a rounded output, where plain PyTorch's terms cancel exactly.

    Args:
        plain: The output, and the gradients of q, k and v if any, computed in the results' dtype.
        right: The same tensors in float64.
        is_causal: Query i sees keys 0 … i only.
    """
    bounds = []
    for index, (rounded, other) in enumerate(zip(plain, right, strict=True)):
        cancelling = 0.0
        if index in (1, 2) and other.any():
            queries, keys = right[0].shape[-2], right[2].shape[-2]
            seen = torch.arange(1, queries + 1).clamp_(max=keys) if is_causal else torch.tensor([keys])
            term = seen.double().pow(-2).mean().sqrt().item()
            # The gradient of a key that no query sees has no terms: it is exactly zero.
            elements = other.numel() * (min(1, queries / keys) if is_causal and index == 2 else 1)
            cancelling = 2 * term * math.sqrt(elements) / torch.linalg.vector_norm(other).item()
        bounds.append(limits_beside_plain(error(rounded, other), plain[0].dtype, cancelling))
    return tuple(bounds)


def _in_parts(inputs: list[Tensor], grad_out: Tensor | None, is_causal: bool) -> tuple[Tensor, ...]:
    """Return the reference's output and gradients, computed in the inputs' dtype.

    Gradients are added up in float32, or in float64 for float64 inputs.
    """
    q, k, v = inputs
    queries, keys = q.shape[-2], k.shape[-2]
    rows_at_once = max(1, SCORE_BYTES // max(1, 8 * keys * q.shape[:-2].numel()))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    gradients = [torch.zeros_like(tensor, dtype=sums) for tensor in inputs] if grad_out is not None else []
    for start in range(0, queries, rows_at_once):
        rows = slice(start, min(start + rows_at_once, queries))
        seen = slice(0, min(keys, rows.stop) if is_causal else keys)
        places = ((..., rows, slice(None)), (..., seen, slice(None)), (..., seen, slice(None)))
        parts = [
            tensor[place].requires_grad_(grad_out is not None) for tensor, place in zip(inputs, places, strict=True)
        ]
        with torch.set_grad_enabled(grad_out is not None):
            part = attention(parts[0], parts[1], parts[2], is_causal, first_query=start)
        out[..., rows, :] = part.detach()
        if grad_out is not None:
            part_gradients = torch.autograd.grad(part, parts, grad_out[..., rows, :])
            for gradient, place, share in zip(gradients, places, part_gradients, strict=True):
                gradient[place] += share
    return out, *gradients
