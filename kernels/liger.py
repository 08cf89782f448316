"""Liger-Kernel's functions (`pip install liger-kernel`) for the operations that have one of the same meaning.

Its `liger_rope` is missing: it pairs element i with i + head_dim / 2, and overwrites its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, which leaves the result's gradient as it is: by default it is overwritten."""
    out: Tensor = _functional().liger_rms_norm(x, weight, eps, in_place=False)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. The backward pass overwrites gate and up with their gradients."""
    out: Tensor = _functional().liger_swiglu(gate, up)
    return out


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T`; the weight's gradient is summed in float32, as ours."""
    out: Tensor = _functional().liger_fused_linear_cross_entropy(hidden, weight, targets, accum_dtype=torch.float32)
    return out


def _functional() -> Any:
    from liger_kernel.transformers import functional

    return functional
