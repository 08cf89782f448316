"""The C++ attention under the registry's names."""

from collections.abc import Callable

from torch import Tensor

from ...registry import AttentionFunction, Implementation
from .operations import BLOCK, blocked, flash, fused, memory, naive

SINGLE_ON_CPU = {"cpu": frozenset({"float32"})}


def _heads_optional(function: Callable[..., Tensor]) -> AttentionFunction:
    def with_or_without_heads(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: int) -> Tensor:
        if q.dim() == 3:
            return function(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal, **options).squeeze(1)
        return function(q, k, v, is_causal, **options)

    return with_or_without_heads


def _blocked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, br: int = BLOCK) -> Tensor:
    return blocked(q, k, v, is_causal, block=br)


def _bytes(name: str) -> Callable[..., tuple[int, int]]:
    def forward_bytes(batch: int, heads: int, length: int, head_dim: int, **options: int) -> tuple[int, int]:
        taken = memory(name, batch, heads, length, length, head_dim, **options)
        return taken.working, taken.output

    return forward_bytes


cpu_naive = Implementation(
    "cpu_naive", _heads_optional(naive), SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("naive")
)
cpu_blocked = Implementation(
    "cpu_blocked", _heads_optional(_blocked), SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("blocked")
)
cpu_fused = Implementation(
    "cpu_fused", _heads_optional(fused), SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("fused")
)
cpu_flash = Implementation("cpu_flash", _heads_optional(flash), SINGLE_ON_CPU, forward_bytes=_bytes("flash"))
