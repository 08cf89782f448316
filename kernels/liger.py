"""Liger-Kernel's functions, where it is installed, for the operations that have one of the same meaning.

Where it is not, they raise RuntimeError ("No available kernel: …").
"""

from typing import Any

import torch
from torch import Tensor

from .attention.library import optional
from .chunked_cross_entropy import check


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, which leaves the result's gradient as it is: by default it is overwritten."""
    out: Tensor = _functional().liger_rms_norm(x, weight, eps, in_place=False)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Its backward pass overwrites both with their gradients. Raises ValueError: shapes differ."""
    if gate.shape != up.shape:
        raise ValueError(f"expected gate and up of one shape, not {tuple(gate.shape)} and {tuple(up.shape)}")
    out: Tensor = _functional().liger_swiglu(gate, up)
    return out


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T`; the weight's gradient is summed in float32, as ours."""
    check(hidden, weight, targets)
    out: Tensor = _functional().liger_fused_linear_cross_entropy(hidden, weight, targets, accum_dtype=torch.float32)
    return out


def _functional() -> Any:
    return optional("liger_kernel.transformers.functional", "liger-kernel")
