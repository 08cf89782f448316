"""Sizes of tiles for each device, dtype and head dimension, and the measurements that chose them.

Measured on an H200 (torch 2.11, Triton 3.6; bfloat16, causal, batch 1, 16 heads, length 16 384; milliseconds of one
kernel, median of 11 with the L2 cache flushed), the best of each size of tile:

    head dim   kernel    queries × keys, warps, stages: time
    64         forward   64 × 128, 4, 3: 1.17   64 × 64, 4, 3: 1.29   128 × 64, 4, 3: 1.37   128 × 128, 8, 3: 1.50
    64         keys      128 × 64, 4, 2: 1.85   64 × 64, 4, 2: 2.26   128 × 128, 8, 2: 2.57  64 × 128, 8, 2: 3.05
    64         queries   64 × 64, 4, 3: 1.31    64 × 128, 4, 3: 1.28  128 × 64, 8, 3: 1.39   128 × 64, 4, 3: 1.43
    64         one pass  64 × 64, 4, 3: 3.50    128 × 128, 8, 2: 3.72
    128        forward   128 × 128, 8, 3: 2.08  64 × 64, 4, 3: 2.08   128 × 64, 8, 4: 2.25   64 × 128, 4, 3: 2.48
    128        keys      64 × 64, 4, 2: 3.52    64 × 128, 8, 3: 3.87  128 × 128, 8, 2: 4.16  32 × 64, 4, 2: 4.32
    128        queries   128 × 64, 8, 3: 2.56   64 × 64, 4, 2: 2.64   64 × 128, 4, 3: 2.74   128 × 128, 8, 2: 2.83
    128        one pass  64 × 128, 8, 2: 7.16   32 × 64, 4, 2: 7.43

Two passes (keys, then queries) are faster than one there. Triton 3.6 waits for each product at once, so the tensor
cores rest while a program computes exponentials unless a second program on the same multiprocessor fills the gap; dQ's
product and its way through shared memory take the room that a second program would need.

Elsewhere the sizes are chosen to fit: no other device was measured. The small ones need at most 99 KiB of shared
memory, what Ada and consumer Blackwell have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.triton_tiles import Tiling, capability


@dataclass(frozen=True)
class Tilings:
    """One tiling for each kernel, and the faster form of the backward pass."""

    forward: Tiling
    keys: Tiling
    queries: Tiling
    one_pass: Tiling
    prefer_one_pass: bool = False


LARGE_HALF = {
    64: Tilings(Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
    128: Tilings(Tiling(128, 128, 8, 3), Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 2)),
    256: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 8, 2), Tiling(64, 32, 8, 2), Tiling(32, 64, 8, 2)),
}
"""Half precision where a multiprocessor has 227 KiB of shared memory (Hopper, data-centre Blackwell), by width."""

SMALL_HALF = {
    64: Tilings(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), True),
    128: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), True),
    256: Tilings(Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 1), True),
}
"""Half precision elsewhere."""

SINGLE = {
    64: Tilings(Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2)),
    128: Tilings(Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 1)),
    256: Tilings(Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
"""Single precision, on every device."""


def choose(q: Tensor, width: int) -> Tilings:
    """For tensors like q, whose head dimension is `width` when rounded up to a power of two."""
    if q.dtype == torch.float32:
        table = SINGLE
    elif capability(q.device) in ((9, 0), (10, 0), (10, 3)):
        table = LARGE_HALF
    else:
        table = SMALL_HALF
    return table[max(width, 64)]
