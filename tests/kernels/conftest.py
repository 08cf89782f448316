"""The one tolerance table of the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative error ‖out − oracle‖ / ‖oracle‖ of an implementation that computes in that dtype."""


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """(out, float64 oracle): the relative error is within the tolerance of out's dtype."""

    def check(out: Tensor, oracle: Tensor) -> None:
        assert oracle.dtype == torch.float64
        assert out.shape == oracle.shape
        error = (torch.linalg.vector_norm(out.double() - oracle) / torch.linalg.vector_norm(oracle)).item()
        assert error <= TOLERANCES[out.dtype], f"relative error {error:.2e} in {out.dtype}"

    return check
