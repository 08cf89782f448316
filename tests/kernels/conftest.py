"""How the kernels' tests judge results: by the tolerances that also the service shows."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.tolerance import TOLERANCES

# Before anything imports a kernel: without a GPU, Triton's interpreter runs them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """(out, float64 oracle): the relative error is within the tolerance of out's dtype."""

    def check(out: Tensor, oracle: Tensor) -> None:
        assert oracle.dtype == torch.float64
        assert out.shape == oracle.shape
        error = (torch.linalg.vector_norm(out.double() - oracle) / torch.linalg.vector_norm(oracle)).item()
        assert error <= TOLERANCES[out.dtype], f"relative error {error:.2e} in {out.dtype}"

    return check
