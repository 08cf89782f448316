"""Runs the Gluon kernels on tensors (batch, heads, rows, head_dim), if they take them."""

import torch
from torch import Tensor

from ...launching import ALIGNMENT
from ..triton.launch import ROW_TILE, Scoring, kind, some
from . import native, plans, rules
from .rules import Bounded

Q, K, V, GRADIENT, BUFFER, DK, DV, DQ, OUT, LOGSUMEXP = range(10)
"""Indices of a backward call's tensors in `source/calls.cpp`."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scoring: Scoring, bounds: Tensor | None = None,
    *, plain: bool | None = None,
) -> bool:  # fmt: skip
    """Fill `out` and `logsumexp`; return False if the kernels do not support these inputs, which have been checked.

    Args:
        bounds: The `document_bounds`, if there are documents.
        plain: `is_causal` of a call without options, for which `native` makes later calls of this kind; None: another
            call.
    """
    if not rules.takes(scoring):
        return False
    bounded = Bounded.of(scoring, q.shape[2], k.shape[2], bounds is not None)
    launch = plans.forward_launch(kind(q), kind(k), kind(v), kind(out), scoring.is_causal, scoring.scale, bounded)
    if launch is None or not _are_aligned(q, k, v):
        return False
    launch((q, k, v, out, logsumexp, *some(bounds)))
    if plain is not None and _may_be_native((out, q)):
        native.learn_forward(q, k, v, plain, launch)
    return True


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, scoring: Scoring, bounds: Tensor | None = None,
    *, plain: bool | None = None,
) -> bool:  # fmt: skip
    """Fill dq, dk and dv; return False if the kernels do not support these inputs. `plain` is as of `forward`.

    For head dimensions up to 128, the order of dq's float32 sum, and so its last bits, differ from run to run; if
    torch's deterministic algorithms are on, the function returns False for them.
    """
    if not rules.takes(scoring):
        return False
    out_gradient = _not_expanded(out_gradient)
    launches = plans.backward_launches(
        plans.BackwardProblem(
            tuple(map(kind, (q, k, v, out_gradient, dk, dv, dq))), out.stride(), logsumexp_gradient is not None,
            scoring.is_causal, scoring.scale, Bounded.of(scoring, q.shape[2], k.shape[2], bounds is not None),
        )
    )  # fmt: skip
    if (
        launches is None
        or not _are_aligned(q, k, v, out_gradient)
        or (not launches.is_deterministic and torch.are_deterministic_algorithms_enabled())
    ):
        return False
    numbers = logsumexp if logsumexp_gradient is None else logsumexp_gradient
    launches.run(out_gradient, q, k, v, out, (dq, dk, dv), logsumexp, numbers, bounds)
    if plain is not None and _may_be_native((dq, q), (dk, k), (dv, v)):
        native.learn_backward(
            out_gradient, q, k, v, out, logsumexp, plain, launches.size, launches.is_deterministic,
            (
                (launches.rows, (OUT, GRADIENT, LOGSUMEXP, LOGSUMEXP, BUFFER)),
                (launches.keys, (Q, K, V, GRADIENT, BUFFER, DK, DV)),
                (launches.queries, (Q, K, V, GRADIENT, BUFFER, DQ)),
            ),
        )  # fmt: skip
    return True


def _not_expanded(gradient: Tensor) -> Tensor:
    """Return the gradient, or a copy of that of a sum: one number, expanded."""
    return gradient.contiguous() if 0 in gradient.stride() else gradient


def _may_be_native(*pairs: tuple[Tensor, Tensor]) -> bool:
    """Return True if results have the strides that `native` gives them, those of `torch.empty_like` of their inputs,
    and if there are many queries: for few, decoding may be faster."""
    is_long = pairs[0][0].shape[2] >= ROW_TILE
    return is_long and all(out.stride() == torch.empty_like(like, device="meta").stride() for out, like in pairs)


def _are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
