"""Runs the Gluon kernels on tensors (batch, heads, rows, head_dim), if they take them."""

import torch
from torch import Tensor

from ...launching import ALIGNMENT
from ..triton.inputs import on_device
from ..triton.launch import Scoring, kind, some
from . import native, plans, rules
from .rules import Bounded

Q, K, V, GRADIENT, BUFFER, DK, DV, DQ, OUT, LOGSUMEXP = range(10)
"""Indices of a backward call's tensors in `source/calls.cpp`."""


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor] | None:
    """Return the output and its log-sum-exp, or None for inputs that must be checked and passed to `forward`.

    Later calls of this kind take the host less time, since `native` then makes them.
    """
    launch = plans.unchecked_forward(kind(q), kind(k), kind(v), is_causal)
    if launch is None or not _are_aligned(q, k, v):
        return None
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    with on_device(q.device):
        launch((q, k, v, out, logsumexp))
    native.learn_forward(q, k, v, is_causal, launch)
    return out, logsumexp


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scoring: Scoring, bounds: Tensor | None = None
) -> bool:
    """Fill `out` and `logsumexp`; return False if the kernels do not support these inputs, which have been checked.

    `bounds` are the `document_bounds`, if there are documents.
    """
    if not rules.takes(scoring):
        return False
    bounded = Bounded.of(scoring, q.shape[2], k.shape[2], bounds is not None)
    launch = plans.forward_launch(kind(q), kind(k), kind(v), kind(out), scoring.is_causal, scoring.scale, bounded)
    if launch is None or not _are_aligned(q, k, v):
        return False
    launch((q, k, v, out, logsumexp, *some(bounds)))
    return True


def gradients(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dq, dk and dv, or None if the kernels do not support these inputs.

    The other tensors come from `attend`, so only the output's gradient is checked.
    """
    out_gradient = _not_expanded(out_gradient)
    launches = plans.unchecked_backward(
        *map(kind, (q, k, v, out_gradient, out)), is_causal, torch.are_deterministic_algorithms_enabled()
    )
    if launches is None or not logsumexp.is_contiguous() or not _are_aligned(q, k, v, out_gradient):
        return None
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with on_device(q.device):
        launches.run(out_gradient, q, k, v, out, results, logsumexp, logsumexp)
    native.learn_backward(
        out_gradient, q, k, v, out, logsumexp, is_causal, launches.size, launches.is_deterministic,
        (
            (launches.rows, (OUT, GRADIENT, LOGSUMEXP, LOGSUMEXP, BUFFER)),
            (launches.keys, (Q, K, V, GRADIENT, BUFFER, DK, DV)),
            (launches.queries, (Q, K, V, GRADIENT, BUFFER, DQ)),
        ),
    )  # fmt: skip
    return results


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, scoring: Scoring, bounds: Tensor | None = None,
) -> bool:  # fmt: skip
    """Fill dq, dk and dv; return False if the kernels do not support these inputs.

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
    return True


def _not_expanded(gradient: Tensor) -> Tensor:
    """Return the gradient, or a copy of that of a sum: one number, expanded."""
    return gradient.contiguous() if 0 in gradient.stride() else gradient


def _are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
