"""Attention as torch ships it: `eager`, written out in PyTorch operations, and each backend of its fused operation.

A backend that cannot take its inputs (head dimension, dtype, device) raises torch's "No available kernel"; nothing
falls back to another one, so what is timed is what is named.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.reference import attention
from kernels.registry import AttentionFunction, Implementation

HALF = frozenset({"bfloat16", "float16"})
SINGLE_AND_HALF = HALF | {"float32"}
ALL = SINGLE_AND_HALF | {"float64"}

NO_KERNEL = "No available kernel"
"""Part of the RuntimeError's message with which torch refuses inputs that the chosen backend cannot take."""


def _fused(backend: SDPBackend) -> AttentionFunction:
    def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if q.dim() == 3:  # the fused backends want a heads axis
            return fused_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal).squeeze(1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return fused_attention


eager = Implementation("eager", attention, {"cpu": ALL, "cuda": ALL})
sdpa_math = Implementation("sdpa_math", _fused(SDPBackend.MATH), {"cpu": ALL, "cuda": ALL})
sdpa_flash = Implementation("sdpa_flash", _fused(SDPBackend.FLASH_ATTENTION), {"cpu": ALL, "cuda": HALF})
sdpa_efficient = Implementation("sdpa_efficient", _fused(SDPBackend.EFFICIENT_ATTENTION), {"cuda": SINGLE_AND_HALF})
sdpa_cudnn = Implementation("sdpa_cudnn", _fused(SDPBackend.CUDNN_ATTENTION), {"cuda": HALF})
