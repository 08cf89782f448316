"""Tolerances: the largest errors of right results, for tests and jobs.

If plain PyTorch can compute the same in the same data type, a result may have one and a half times PyTorch's error and
a little more (`limits_beside_plain`). Otherwise a table of fixed limits applies (`fixed_limits`).

Three errors are checked. The whole tensor's error detects errors everywhere, such as sums in too few bits; the worst
element's error detects a single wrong element, which hardly changes the whole tensor's error. The slope detects factors
that are nearly 1. The rounding errors of right results are independent of each other and have the mean zero, so that
they cancel in the slope: a factor of 1.001 is far below the round-off of bfloat16, and in the slope of a thousand rows
it is ten times the noise.
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
TIMES_PLAIN: Final = 1.5
"""Largest error of the whole tensor, in errors of the plain computation."""
TIMES_PLAIN_ELEMENT: Final = 2
"""The same of the worst element, and of the slope, which vary more."""
ABSOLUTE: Final = {torch.float64: 1e-12, torch.float32: 6e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Error that an element may have in addition to TIMES_PLAIN_ELEMENT times the plain computation's error. In half
precision this is eight times the unit round-off. It is needed since plain PyTorch is sometimes exact where another
order of additions is not."""
WHOLE: Final = {torch.float64: 2.5e-13, torch.float32: 5e-6, torch.bfloat16: 2**-10, torch.float16: 2**-13}
"""The same of the whole tensor. In half precision this is a quarter of the unit round-off, half of the root mean square
of rounding errors."""
FEW: Final = 8
"""Over the root of the number of rows: WHOLE may grow by this factor, since the plain error of few rows may be small by
chance."""
SLOPE: Final = {torch.float64: 2.5e-13, torch.float32: 5e-6, torch.bfloat16: 3e-5, torch.float16: 1e-5}
"""Largest deviation of the slope from 1. Rounding to the nearest has a bias of about a twelfth of the squared unit
round-off, 1.3e-6 in bfloat16."""
NOISE: Final = 5
"""Standard errors by which the slope may be off in addition, by chance."""
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
    the neighbours' gradients."""
    slope: float = 0.0
    """The deviation from 1 of the slope ⟨out, oracle⟩ / ⟨oracle, oracle⟩, every row counted in units of its largest
    element, as far as noise does not explain it."""

    def why_wrong(self, limit: Error) -> str | None:
        """Return which limit this error exceeds; None if it exceeds none. NaN exceeds every limit."""
        if not self.relative <= limit.relative:
            return f"relative error {self.relative:.2e}, allowed {limit.relative:.1e}"
        if not self.element <= limit.element:
            return f"relative error {self.element:.2e} in one element, allowed {limit.element:.1e}"
        if not self.slope <= limit.slope:
            return f"too large or too small everywhere by a factor of 1 ± {self.slope:.1e}, allowed {limit.slope:.1e}"
        return None

    def shares(self, limit: Error) -> dict[str, float]:
        """Return each error as a part of its limit: above 1, it is wrong."""
        pairs = {name: (getattr(self, name), getattr(limit, name)) for name in ("relative", "element", "slope")}
        return {name: mine / allowed if mine else 0.0 for name, (mine, allowed) in pairs.items()}


def fixed_limits(tolerance: float) -> Error:
    """Return the limits for a tolerance, such as one of TOLERANCES."""
    return Error(tolerance, ELEMENT * tolerance, tolerance)


def limits_beside_plain(
    plain: Error, dtype: torch.dtype, cancelling: float = 0.0, *, rows: int = 1, slope: float | None = None
) -> Error:
    """Return the limits for a result of this dtype, from the error of the plain computation.

    Args:
        plain: The error of the plain computation in that dtype.
        cancelling: If the result is a difference of terms that cancel: their size relative to the result's.
        rows: Number of the result's rows, which have independent errors.
        slope: Largest deviation of the slope, if it is not SLOPE's.
    """
    if not math.isfinite(plain.relative + plain.element):  # plain PyTorch overflows where others may not
        return fixed_limits(TOLERANCES[dtype])
    more, few = 1 + cancelling, FEW / math.sqrt(rows) if dtype.itemsize == 2 else 0.0
    return Error(
        TIMES_PLAIN * plain.relative + more * WHOLE[dtype] * (1 + few),
        TIMES_PLAIN_ELEMENT * plain.element + more * ABSOLUTE[dtype],
        TIMES_PLAIN_ELEMENT * plain.slope + more * (SLOPE[dtype] if slope is None else slope),
    )


def limits_of_mean(plain: Error, dtype: torch.dtype, rows: int) -> Error:
    """Return the limits for a single number, the mean of this many rows, from the error of the plain computation.

    The last rounding may be as large as the unit round-off, or by chance as small as 0: it says nothing about the
    errors before, which the rows average.
    """
    if dtype.itemsize != 2 or not math.isfinite(plain.relative):
        return limits_beside_plain(plain, dtype)
    rounding = ABSOLUTE[dtype] / 8
    allowed = 1.05 * rounding + ABSOLUTE[dtype] / math.sqrt(rows) + 2 * max(0.0, plain.relative - rounding)
    return Error(allowed, allowed, allowed)


def limits_in_tf32(plain: Error) -> Error:
    """Return the limits for float32 inputs with products in tf32, from the error of the plain computation in tf32."""
    fixed = fixed_limits(TF32_TOLERANCE)
    if not math.isfinite(plain.relative + plain.element):
        return fixed
    return Error(
        max(fixed.relative, 3 * plain.relative),
        max(fixed.element, 3 * plain.element),
        max(fixed.slope, 3 * plain.slope),
    )


def error(out: Tensor, oracle: Tensor, scale: float = 1.0) -> Error:
    """Compute the error of `out` against its oracle of the same shape, which is computed in float64.

    Args:
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
    oracle = oracle.double()
    whole = torch.linalg.vector_norm(oracle)
    counted = (oracle.any(dim=-1).sum() * oracle.shape[-1] if whole else oracle.new_tensor(oracle.numel())).sqrt()
    rms = whole / counted if whole else oracle.new_tensor(scale)
    differences = out.detach().double() - oracle
    relative = torch.linalg.vector_norm(differences) / (rms * counted)
    near = _size_nearby(oracle).clamp_(min=rms * FLOOR if whole else rms)
    largest = torch.maximum(torch.linalg.vector_norm(oracle, math.inf, dim=-1), near)
    slope = _slope(differences, oracle, largest) if whole else 0.0
    return Error(relative.item(), differences.abs_().div_(largest.unsqueeze(-1)).max().item(), slope)


def _slope(differences: Tensor, oracle: Tensor, sizes: Tensor) -> float:
    """Return by how much the slope deviates from 1, as far as noise does not explain it.

    The standard error is that of a ratio of two sums over rows (of a tensor with one axis, over elements), from the
    rows' spread, so that it is small where errors are small or rows many.
    """
    off, total = differences * oracle, oracle.square()
    if oracle.dim() > 1:
        off, total = (products.sum(-1).div_(sizes.square()).flatten() for products in (off, total))
    whole = total.sum()
    # Rows that are small beside their neighbours hardly count: Kish's effective number of weighted samples.
    rows = float(whole.square() / total.square().sum())
    if rows < 4:  # too few to know the spread
        return 0.0
    deviation = off.sum() / whole
    noise = torch.linalg.vector_norm(off - deviation * total) / whole
    # A spread that is estimated from few rows may be far too small.
    return max(0.0, float(deviation.abs() - NOISE * (1 + 8 / rows) * noise))


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
