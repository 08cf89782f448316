"""The C++ attention under the registry's names."""

from __future__ import annotations

from torch import Tensor

from kernels.attention.cpu.operations import blocked, flash, fused, naive
from kernels.registry import AttentionFunction, Implementation

SINGLE_ON_CPU = {"cpu": frozenset({"float32"})}


def _heads_optional(function: AttentionFunction) -> AttentionFunction:
    def with_or_without_heads(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if q.dim() == 3:
            return function(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal).squeeze(1)
        return function(q, k, v, is_causal)

    return with_or_without_heads


cpu_naive = Implementation("cpu_naive", _heads_optional(naive), SINGLE_ON_CPU, has_backward=False)
cpu_blocked = Implementation("cpu_blocked", _heads_optional(blocked), SINGLE_ON_CPU, has_backward=False)
cpu_fused = Implementation("cpu_fused", _heads_optional(fused), SINGLE_ON_CPU, has_backward=False)
cpu_flash = Implementation("cpu_flash", _heads_optional(flash), SINGLE_ON_CPU)
