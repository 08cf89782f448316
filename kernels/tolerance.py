"""Tolerances: a result is right up to this error. There is one rule for tests and for jobs alike.

Where the same computation can be written out in plain PyTorch, in the same data type, errors may be twice as large as
its own, and a little more (`beside`). FlashAttention's own tests judge in this way. A table of fixed limits (`fixed`)
serves where there is nothing to compare with.

Two errors are judged, each relative to what is right. That of the whole tensor shows what is a little wrong everywhere,
a wrong scale for instance; that of the worst element shows one wrong element, which the whole would hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error ‖out − oracle‖ / ‖oracle‖ of an implementation that computes in that dtype."""
TF32_TOLERANCE: Final = 5e-3
"""The same for float32 inputs with products in tf32: tensor cores truncate numbers to tf32 instead of rounding them."""
ELEMENT: Final = 3
"""One element may err by this many tolerances of its row's largest."""
TIMES_PLAIN: Final = 2
ABSOLUTE: Final = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""The error that an element may have in addition to TIMES_PLAIN times the plain computation's; the whole tensor may
have a quarter of it. In half precision these are four units in the last place. Plain PyTorch is sometimes exact where
another order of sums is not."""
NEAR: Final = 32
"""Number of rows before, and of rows after a row, whose size counts for that row."""
FLOOR: Final = 0.25
"""Least size of rows, relative to the whole tensor's."""


@dataclass(frozen=True)
class Error:
    """The distance of a tensor from its oracle; or the largest that is right."""

    relative: float
    """‖out − oracle‖ / ‖oracle‖, in the Euclidean norm of all elements; for a vanishing oracle see `error`, `scale`."""
    element: float
    """The largest error of an element, relative to the largest of its row (last axis); or to the size of the rows
    around, where that is larger: gradients of a query that sees few keys are differences of terms as large as theirs.
    """

    def why_wrong(self, limit: Error) -> str | None:
        """Say what is wrong with a result of this error; None if it is right. An error that is NaN is wrong."""
        if not self.relative <= limit.relative:
            return f"relative error {self.relative:.2e}, allowed {limit.relative:.1e}"
        if not self.element <= limit.element:
            return f"relative error {self.element:.2e} in one element, allowed {limit.element:.1e}"
        return None


def fixed(tolerance: float) -> Error:
    """Return the limits for a result with this tolerance, one of the table's for instance."""
    return Error(tolerance, ELEMENT * tolerance)


def beside(plain: Error, dtype: torch.dtype, cancelling: float = 0.0) -> Error:
    """Return the limits for a result of this dtype.

    Args:
        plain: The error of the plain computation in that dtype.
        dtype: The result's data type.
        cancelling: Size of the terms of which the result is a difference, relative to the result's.
    """
    if not math.isfinite(plain.relative + plain.element):  # it overflows where a better one does not
        return fixed(TOLERANCES[dtype])
    more = ABSOLUTE[dtype] * (1 + cancelling)
    return Error(TIMES_PLAIN * plain.relative + more / 4, TIMES_PLAIN * plain.element + more)


def error(out: Tensor, oracle: Tensor, scale: float = 1.0) -> Error:
    """Compute the error of `out` against its float64 oracle of the same shape.

    Args:
        out: The result.
        oracle: The right result.
        scale: Used where the oracle is zero everywhere, so that the error can be relative to nothing else: the root
            mean square of the elements of the terms that cancel. With one key that every query sees, the gradients of
            queries and keys are differences of equal terms, of which round-off is left. For attention to q, k, v and
            grad_out that are normally distributed with variance 1 these terms are of size 1, whatever the head
            dimension: the products of grad_out and v grow with its square root, and scores are divided by that.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != oracle.shape:
        raise ValueError(f"shape {tuple(out.shape)}, and the oracle's is {tuple(oracle.shape)}")
    if oracle.numel() == 0:
        return Error(0.0, 0.0)
    whole = torch.linalg.vector_norm(oracle)
    counted = (oracle.any(dim=-1).sum() * oracle.shape[-1] if whole else oracle.new_tensor(oracle.numel())).sqrt()
    rms = whole / counted if whole else oracle.new_tensor(scale)
    differences = (out.double() - oracle).abs_()
    relative = torch.linalg.vector_norm(differences) / (rms * counted)
    near = _size_nearby(oracle).clamp_(min=rms * FLOOR if whole else rms)
    largest = torch.maximum(torch.linalg.vector_norm(oracle, math.inf, dim=-1), near)
    return Error(relative.item(), differences.div_(largest.unsqueeze(-1)).max().item())


def _size_nearby(tensor: Tensor) -> Tensor:
    """The root mean square of the elements in each row and its neighbours, of the tensor's shape less the last axis.

    Rows of zeros do not count: those of keys that no query sees say nothing about the others.
    """
    squares = torch.linalg.vector_norm(tensor, dim=-1).square() / tensor.shape[-1]
    rows = squares.shape[-1] if squares.dim() else 1
    flat = squares.reshape(-1, 1, rows)
    both = torch.stack((flat, (flat != 0).to(flat.dtype)))
    sums, counts = avg_pool1d(both.flatten(0, 1), 2 * NEAR + 1, 1, NEAR).chunk(2)
    return (sums / counts.clamp_(min=1 / (2 * NEAR + 1))).reshape(squares.shape).sqrt_()
