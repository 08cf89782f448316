"""When a result counts as right: one tolerance per data type, for tests and for what is shown beside times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error ‖out − oracle‖ / ‖oracle‖ of an implementation that computes in that dtype."""
TF32_TOLERANCE: Final = 5e-3
"""The same for float32 inputs whose products are of tf32, to which tensor cores cut numbers rather than round them."""
ROWS: Final = 10
"""Tolerances that one row may err: a whole that is right on average may hold a row that is wrong."""


@dataclass(frozen=True)
class Error:
    """How far a tensor is from its oracle."""

    relative: float
    """‖out − oracle‖ / ‖oracle‖, in the Euclidean norm of all elements."""
    worst_row: float
    """The same of the worst row (last axis); a row smaller than the root mean square of all is measured by that."""

    def why_wrong(self, tolerance: float) -> str | None:
        """What is wrong with it, or None. Not a number is wrong."""
        if not self.relative <= tolerance:
            return f"relative error {self.relative:.2e}, tolerance {tolerance:.0e}"
        if not self.worst_row <= ROWS * tolerance:
            return f"relative error {self.worst_row:.2e} in one row, tolerance {ROWS * tolerance:.0e}"
        return None


def error(out: Tensor, oracle: Tensor) -> Error:
    """The error of `out` against its float64 oracle of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != oracle.shape:
        raise ValueError(f"shape {tuple(out.shape)}, and the oracle's is {tuple(oracle.shape)}")
    differences = torch.linalg.vector_norm(out.double() - oracle, dim=-1)
    norms = torch.linalg.vector_norm(oracle, dim=-1)
    whole, rms = torch.linalg.vector_norm(norms), norms.square().mean().sqrt()
    if whole == 0:  # one key, seen by every query: the gradients of queries and keys vanish
        largest = differences.max().item()
        return Error(largest, largest)
    relative = torch.linalg.vector_norm(differences) / whole
    return Error(relative.item(), (differences / norms.clamp(min=rms)).max().item())
