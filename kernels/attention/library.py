"""Attention as torch ships it: `eager`, written out in PyTorch operations; `compiled`, the same through torch.compile;
each backend of its fused operation; and FlexAttention, compiled.

A backend that does not support its inputs (head dimension, dtype, device) raises torch's "No available kernel". It
never falls back to another backend, so the named backend is the one that is timed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.reference import attention
from kernels.registry import AttentionFunction, Implementation

HALF = frozenset({"bfloat16", "float16"})
SINGLE_AND_HALF = HALF | {"float32"}
ALL = SINGLE_AND_HALF | {"float64"}

NO_KERNEL = "No available kernel"
"""Part of the message of torch's RuntimeError for inputs that the chosen backend does not support."""


def _fused(backend: SDPBackend) -> AttentionFunction:
    def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if q.dim() == 3:  # the fused backends want a heads axis
            return fused_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal).squeeze(1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return fused_attention


@functools.cache
def _compiled(function: Any) -> Any:
    # Compile kernels for exactly these sizes: dynamic ones are slower. fullgraph raises an error instead of returning
    # to eager silently.
    return torch.compile(function, dynamic=False, fullgraph=True)


def _each_size_compiled() -> Any:
    # By default torch compiles a function for only a few sizes.
    many = 1 << 16
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)


def _compiled_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    if torch.compiler.is_compiling():
        return attention(q, k, v, is_causal)  # type: ignore[no-any-return]
    with _each_size_compiled():
        out: Tensor = _compiled(attention)(q, k, v, is_causal)
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if q.dim() == 3:
        return _flex(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal).squeeze(1)
    mask = _causal_blocks(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    with _each_size_compiled():
        out: Tensor = _compiled(flex_attention)(q, k, v, block_mask=mask)
    return out


@functools.lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(visible, None, None, queries, keys, device=device)


eager = Implementation("eager", attention, {"cpu": ALL, "cuda": ALL})
compiled = Implementation("compiled", _compiled_attention, {"cpu": ALL, "cuda": ALL})
flex = Implementation("flex", _flex, {"cuda": SINGLE_AND_HALF})
sdpa_math = Implementation("sdpa_math", _fused(SDPBackend.MATH), {"cpu": ALL, "cuda": ALL})
sdpa_flash = Implementation("sdpa_flash", _fused(SDPBackend.FLASH_ATTENTION), {"cpu": ALL, "cuda": HALF})
sdpa_efficient = Implementation("sdpa_efficient", _fused(SDPBackend.EFFICIENT_ATTENTION), {"cuda": SINGLE_AND_HALF})
sdpa_cudnn = Implementation("sdpa_cudnn", _fused(SDPBackend.CUDNN_ATTENTION), {"cuda": HALF})
