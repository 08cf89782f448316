"""The C++ attention under the registry's names."""

from collections.abc import Callable

from torch import Tensor

from ...registry import Implementation
from .operations import BLOCK, blocked, flash, fused, memory, naive

SINGLE_ON_CPU = {"cpu": frozenset({"float32"})}


def _blocked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, br: int = BLOCK) -> Tensor:
    return blocked(q, k, v, is_causal, block=br)


def _bytes(name: str) -> Callable[..., tuple[int, int]]:
    def forward_bytes(batch: int, heads: int, length: int, head_dim: int, **options: int) -> tuple[int, int]:
        taken = memory(name, batch, heads, length, length, head_dim, **options)
        return taken.working, taken.output

    return forward_bytes


cpu_naive = Implementation("cpu_naive", naive, SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("naive"))
cpu_blocked = Implementation(
    "cpu_blocked", _blocked, SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("blocked")
)
cpu_fused = Implementation("cpu_fused", fused, SINGLE_ON_CPU, has_backward=False, forward_bytes=_bytes("fused"))
cpu_flash = Implementation("cpu_flash", flash, SINGLE_ON_CPU, forward_bytes=_bytes("flash"))
