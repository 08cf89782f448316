"""Tolerances: a result is right up to this error. There is one per data type, for tests and for jobs alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error ‖out − oracle‖ / ‖oracle‖ of an implementation that computes in that dtype."""
TF32_TOLERANCE: Final = 5e-3
"""The same for float32 inputs with products in tf32, to which tensor cores cut numbers rather than round them."""
ROWS: Final = 10
"""One row may err by this many tolerances. A tensor that is right on average may hold a row that is wrong."""


@dataclass(frozen=True)
class Error:
    """The distance of a tensor from its oracle."""

    relative: float
    """‖out − oracle‖ / ‖oracle‖, in the Euclidean norm of all elements; for a vanishing oracle see `error`, `scale`."""
    worst_row: float
    """The largest error of a row (last axis), relative to the row's norm, or to the root mean square of all rows' norms
    where that is larger."""

    def why_wrong(self, tolerance: float) -> str | None:
        """Say what is wrong with a result of this error; None if it is right. An error that is NaN is wrong."""
        if not self.relative <= tolerance:
            return f"relative error {self.relative:.2e}, tolerance {tolerance:.0e}"
        if not self.worst_row <= ROWS * tolerance:
            return f"relative error {self.worst_row:.2e} in one row, tolerance {ROWS * tolerance:.0e}"
        return None


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
    differences = torch.linalg.vector_norm(out.double() - oracle, dim=-1)
    norms = torch.linalg.vector_norm(oracle, dim=-1)
    whole, rms = torch.linalg.vector_norm(norms), norms.square().mean().sqrt()
    if whole == 0:
        rms = norms.new_tensor(scale * oracle.shape[-1] ** 0.5)
        whole = rms * norms.numel() ** 0.5
    relative = torch.linalg.vector_norm(differences) / whole
    return Error(relative.item(), (differences / norms.clamp(min=rms)).max().item())
