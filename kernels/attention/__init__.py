"""Attention: one reference, which is the oracle of every test, and the implementations that are compared to it.

Shapes are (batch, heads, sequence, head_dim), or (batch, sequence, head_dim) without heads. Scores are scaled by
1/sqrt(head_dim). The causal mask is aligned top-left, as in torch's scaled_dot_product_attention: query i sees keys
0 … i, also where there are more keys than queries.

`TiledFlashAttention2` and `TritonFlashAttention2` are autograd functions: `.apply(q, k, v, is_causal=False)`.
"""

from typing import Any

__all__ = ["TiledFlashAttention2", "TritonFlashAttention2"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that importing this package imports neither torch nor Triton.
    if name == "TiledFlashAttention2":
        from kernels.attention.tiled import TiledFlashAttention2

        return TiledFlashAttention2
    if name == "TritonFlashAttention2":
        from kernels.attention.flash_triton import TritonFlashAttention2

        return TritonFlashAttention2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
