"""Computes attention's right output and gradients, at any length: the reference in float64, some queries at a time.

The score matrix of a long sequence does not fit into memory. In the forward pass the queries' rows are independent, and
gradients of keys and values are sums over queries, so computing in parts is exact. The reference is also computed in
the inputs' dtype: its error determines how large an implementation's error may be.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..tolerance import Error, error, limits_beside_plain
from .masks import VisibleKeys, visible_keys
from .problem import AttentionProblem
from .reference import attend

SCORE_BYTES = 256 << 20
"""Size of one part's scores; about six tensors of it live at a time."""


SLOPE: Final = 4e-4
"""Largest deviation of the slope in half precision: plain PyTorch rounds scores, and weights are exponentials, whose
mean rounding errors raise. A scale that is off by 0.1 % shows 1e-3 if scores are normally distributed."""
CAPPED_SLOPE: Final = 1e-3
"""The same with a soft cap: GPUs approximate the hyperbolic tangent to 11 bits."""

SCORE_ERROR: Final = 4e-6
"""Largest relative error of weights for scores that spread by 1, of sums in float32: 64 times its unit round-off."""


class Oracle(NamedTuple):
    """The output, and the gradients of queries, keys and values (empty without `grad_out`), in float64."""

    out: Tensor
    gradients: tuple[Tensor, ...]
    limits: tuple[Error, ...]
    """Largest errors of a right output, and of right gradients."""
    plain: tuple[Error, ...]
    """Errors of the reference, if it computes in the inputs' dtype."""
    logsumexp: Tensor
    """Of each query's scores: q's shape without the last axis."""


def oracle(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, problem: AttentionProblem, size: float = 1.0
) -> Oracle:
    """Compute attention's results for these inputs in float64.

    Args:
        q: Queries (…, queries, head_dim), of any dtype; the oracle takes their rounded values.
        k: Keys (…, keys, head_dim), with the problem's key heads.
        v: Values, of k's shape.
        grad_out: The output's gradient (…, queries, head_dim); None: no gradients.
        size: See `limits`.
    """
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    wide = [tensor.double() for tensor in (q, k, v)]
    out, logsumexp, *gradients = _in_parts(wide, None if grad_out is None else grad_out.double(), problem)
    plain, _, *plain_gradients = _in_parts([q, k, v], grad_out, problem)
    found = tuple(map(error, (plain, *plain_gradients), (out, *gradients)))
    allowed = limits((plain, *plain_gradients), (out, *gradients), problem, size)
    return Oracle(out, tuple(gradients), allowed, found, logsumexp)


def limits(
    plain: Sequence[Tensor], right: Sequence[Tensor], problem: AttentionProblem, size: float = 1.0
) -> tuple[Error, ...]:
    """Return the largest allowed errors of results.

    Gradients of q and k are differences of two terms. For inputs of size 1, each term has about the size 1 divided by
    the number of keys that a query sees. If queries see few keys, the terms nearly cancel: FlashAttention computes the
    subtracted term, D, from a rounded output, where plain PyTorch's terms cancel exactly. With a scale of σ/√head_dim,
    each term is σ times the sum of the squared weights. That is exp(σ² - 1) times as large as with σ = 1, since scores
    are spread by σ, and 1 at most. A soft cap also bounds the spread. With queries and keys of size s, σ grows with s²,
    and the terms with s.

    Args:
        plain: The output, and the gradients of q, k and v if any, computed in the results' dtype.
        right: The same tensors in float64.
        size: Standard deviation of the elements of queries and keys.
    """
    bounds = []
    scaled = size**2 * (1.0 if problem.scale is None else problem.scale * math.sqrt(right[0].shape[-1]))
    for index, (rounded, other) in enumerate(zip(plain, right, strict=True)):
        cancelling = 0.0
        if index in (1, 2) and other.any():
            seen, share_of_keys = _seen(right[0], right[2], problem)
            spread = min(scaled, problem.softcap or scaled, 7.0)  # above, the sum of the squares is 1 anyway
            terms = scaled / size * (math.exp(spread**2 - 1) / seen[seen > 0].double()).clamp(max=1)
            term = terms.square().sum().div(seen.shape[0]).sqrt().item()
            # The gradient of a key that no query sees has no terms: it is exactly zero.
            elements = other.numel() * (share_of_keys if index == 2 else 1)
            cancelling = 2 * term * math.sqrt(elements) / torch.linalg.vector_norm(other).item()
        slope = None if plain[0].dtype.itemsize > 2 else SLOPE if problem.softcap is None else CAPPED_SLOPE
        rows, found = max(1, other.numel() // other.shape[-1]), error(rounded, other)
        bound = limits_beside_plain(found, plain[0].dtype, cancelling, rows=rows, slope=slope)
        # A rounding error of a score is a relative error of its weight.
        of_scores = SCORE_ERROR * scaled * (2**-29 if plain[0].dtype == torch.float64 else 1)
        bounds.append(Error(bound.relative + of_scores, bound.element + 4 * of_scores, bound.slope + of_scores))
    return tuple(bounds)


def _visible(q: Tensor, k: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor, bool]:
    """The first key that each query sees, the end of these keys, and whether some see none."""
    queries, keys = q.shape[-2], k.shape[-2]
    problem.band(queries, keys)  # checks the documents' lengths
    names = ("window", "bottom_right", "document_ends")
    options = {name: value for name, value in problem.options(q.device).items() if name in names}
    first, end, may_be_none = visible_keys(queries, keys, q.device, problem.is_causal, **options)
    none = torch.zeros(queries, dtype=torch.int64, device=q.device)
    return none if first is None else first, none + keys if end is None else end, may_be_none


def _seen(q: Tensor, k: Tensor, problem: AttentionProblem) -> tuple[Tensor, float]:
    """The number of keys that each query sees, and the share of the keys that any query sees."""
    first, end, _ = _visible(q, k, problem)
    seen = (end - first).clamp(min=0)
    changes = torch.zeros(k.shape[-2] + 1, dtype=torch.int64, device=q.device)
    some = seen > 0
    changes.index_add_(0, first[some], torch.ones_like(first[some]))
    changes.index_add_(0, end[some], -torch.ones_like(end[some]))
    return seen, (changes.cumsum(0)[:-1] > 0).double().mean().item()


def _in_parts(inputs: list[Tensor], grad_out: Tensor | None, problem: AttentionProblem) -> tuple[Tensor, ...]:
    """Return the reference's output, log-sum-exp and gradients, computed in the inputs' dtype.

    Gradients are added up in float32, or in float64 for float64 inputs.
    """
    q, k, _ = inputs
    queries, keys = q.shape[-2], k.shape[-2]
    rows_at_once = max(1, SCORE_BYTES // max(1, 8 * keys * q.shape[:-2].numel()))
    first, end, may_be_none = _visible(q, k, problem)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, logsumexp = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=sums)
    gradients = [torch.zeros_like(tensor, dtype=sums) for tensor in inputs] if grad_out is not None else []
    for start in range(0, queries, rows_at_once):
        rows = slice(start, min(start + rows_at_once, queries))
        seen = slice(int(first[rows].min()), int(end[rows].max()))
        if seen.start >= seen.stop:
            continue
        places = ((..., rows, slice(None)), (..., seen, slice(None)), (..., seen, slice(None)))
        parts = [
            tensor[place].requires_grad_(grad_out is not None) for tensor, place in zip(inputs, places, strict=True)
        ]
        hidden = VisibleKeys(first, end, may_be_none).hidden(seen, rows)
        with torch.set_grad_enabled(grad_out is not None):
            part, part_logsumexp = attend(
                parts[0], parts[1], parts[2], hidden, may_be_none,
                scale=problem.scale, softcap=problem.softcap, return_lse=True,
            )  # fmt: skip
        out[..., rows, :], logsumexp[..., rows] = part.detach(), part_logsumexp.detach()
        if grad_out is not None:
            part_gradients = torch.autograd.grad(part, parts, grad_out[..., rows, :])
            for gradient, place, share in zip(gradients, places, part_gradients, strict=True):
                gradient[place] += share
    return out, logsumexp, *gradients
