"""Attention: the reference, which is the oracle of every test, and the implementations that are compared with it.

Shapes are (batch, heads, sequence, head_dim); the autograd functions, `flash_attention` and the reference also take
(batch, sequence, head_dim). Scores are scaled by 1/sqrt(head_dim). The causal mask is aligned top-left, as in torch's
scaled_dot_product_attention: query i sees keys 0 … i, also where there are more keys than queries.
`problem.AttentionProblem` describes all else that can be asked for.

`flash_attention` is the Triton implementation. `TiledFlashAttention2` and `TritonFlashAttention2` are autograd
functions: `.apply(q, k, v, is_causal=False)`. `cpu` has the implementations in C++. All are imported on first use, so
that importing this package imports neither torch nor Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cpu
    from .flash_triton import TritonFlashAttention2, flash_attention
    from .tiled import TiledFlashAttention2

__all__ = ["TiledFlashAttention2", "TritonFlashAttention2", "cpu", "flash_attention"]

_HOMES = {
    "TiledFlashAttention2": ".tiled",
    "TritonFlashAttention2": ".flash_triton",
    "flash_attention": ".flash_triton",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
