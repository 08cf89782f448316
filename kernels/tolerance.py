"""Tolerances: the largest errors of right results, for tests and jobs.

If plain PyTorch can compute the same in the same data type, a result may have twice PyTorch's error and a little more
(`limits_beside_plain`), as in FlashAttention's own tests. Otherwise a table of fixed limits applies (`fixed_limits`).

Two relative errors are checked. The whole tensor's error detects small errors everywhere, such as a wrong scale; the
worst element's error detects a single wrong element, which hardly changes the whole tensor's error.
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
"""Largest error of one element relative to its row's largest element, in tolerances."""
TIMES_PLAIN: Final = 2
ABSOLUTE: Final = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Error that an element may have in addition to TIMES_PLAIN times the plain computation's error; the whole tensor may
have a quarter of it. In half precision this is four units in the last place. It is needed since plain PyTorch is
sometimes exact where another order of additions is not."""
NEAR: Final = 32
"""Number of rows before, and of rows after a row, that count as its neighbours."""
FLOOR: Final = 0.25
"""Least size of rows, relative to the whole tensor's."""


@dataclass(frozen=True)
class Error:
    """The error of a tensor against its oracle, or the largest allowed one."""

    relative: float
    """‖out − oracle‖ / ‖oracle‖, in the Euclidean norm of all elements; if the oracle is 0, see `scale` of `error`."""
    element: float
    """The largest error of an element, relative to the largest element of its row (last axis) or to the size of the
    neighbouring rows if that is larger: the gradient of a query that sees few keys is a difference of terms as large as
    the neighbours' gradients.
    """

    def why_wrong(self, limit: Error) -> str | None:
        """Return which limit this error exceeds; None if it exceeds none. NaN exceeds every limit."""
        if not self.relative <= limit.relative:
            return f"relative error {self.relative:.2e}, allowed {limit.relative:.1e}"
        if not self.element <= limit.element:
            return f"relative error {self.element:.2e} in one element, allowed {limit.element:.1e}"
        return None


def fixed_limits(tolerance: float) -> Error:
    """Return the limits for a tolerance, such as one of TOLERANCES."""
    return Error(tolerance, ELEMENT * tolerance)


def limits_beside_plain(plain: Error, dtype: torch.dtype, cancelling: float = 0.0) -> Error:
    """Return the limits for a result of this dtype, from the error of the plain computation.

    Args:
        plain: The error of the plain computation in that dtype.
        dtype: The result's data type.
        cancelling: If the result is a difference of terms that cancel: their size relative to the result's.
    """
    if not math.isfinite(plain.relative + plain.element):  # plain PyTorch overflows where others may not
        return fixed_limits(TOLERANCES[dtype])
    more = ABSOLUTE[dtype] * (1 + cancelling)
    return Error(TIMES_PLAIN * plain.relative + more / 4, TIMES_PLAIN * plain.element + more)


def error(out: Tensor, oracle: Tensor, scale: float = 1.0) -> Error:
    """Compute the error of `out` against its float64 oracle of the same shape.

    Args:
        out: The result.
        oracle: The right result.
        scale: The size to which errors are relative if the oracle is zero everywhere: the root mean square of the
            elements of the terms that cancel. With a single key, the gradients of queries and keys are differences of
            equal terms, so only round-off remains. If q, k, v and grad_out are normally distributed with variance 1,
            these terms have size 1 for every head dimension: the products of grad_out and v grow with its square root,
            and scores are divided by that.

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
    """Return the root mean square of the elements in each row and its neighbours, of tensor's shape less the last axis.

    Rows of zeros do not count: gradients of keys that no query sees are zero, whatever the others' size is.
    """
    squares = torch.linalg.vector_norm(tensor, dim=-1).square() / tensor.shape[-1]
    rows = squares.shape[-1] if squares.dim() else 1
    flat = squares.reshape(-1, 1, rows)
    both = torch.stack((flat, (flat != 0).to(flat.dtype)))
    sums, counts = avg_pool1d(both.flatten(0, 1), 2 * NEAR + 1, 1, NEAR).chunk(2)
    return (sums / counts.clamp_(min=1 / (2 * NEAR + 1))).reshape(squares.shape).sqrt_()
