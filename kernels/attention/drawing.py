"""Random inputs on which attention is checked: normally distributed, with scores that differ little, much, or hugely.

With normal inputs of variance 1 and the usual scale, scores have the standard deviation 1. Other inputs show other
faults: nearly equal weights, which plain PyTorch computes most exactly, show sums in too few bits; a scale that is off
by ε changes the output by about σ²ε if scores spread by σ; and exp overflows for a score above 88, unless the maximum
was subtracted.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .problem import AttentionProblem

SPREADS: Final = {"nearly equal scores": 0.5, "unequal scores": 2.0, "large scores": 60.0}
"""Standard deviations of the scaled scores."""
LARGEST_PRODUCT: Final = 1e4
"""Largest standard deviation of the products of q and k, which overflow in float16 from 65 504 on."""


def size_for(spread: float, problem: AttentionProblem, head_dim: int) -> float:
    """Return the standard deviation of the elements of q and k that gives scaled scores this one, or, with a small
    scale, as much as float16 has room for."""
    scale = 1 / math.sqrt(head_dim) if problem.scale is None else problem.scale
    return math.sqrt(min(spread / scale, LARGEST_PRODUCT) / math.sqrt(head_dim))


def draw(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, generator: torch.Generator, size: float = 1.0
) -> list[Tensor]:
    """Draw q, k, v and the output's gradient of these shapes; q and k with elements of this size."""
    sizes = (size, size, 1.0, 1.0)
    return [
        (torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32) * factor).to(dtype)
        for shape, factor in zip(shapes, sizes, strict=True)
    ]
