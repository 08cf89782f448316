"""Sizes of tiles for each device, dtype and head dimension, and the measurements that chose them.

Measured on an H200 on 2026-11-21 (torch 2.11, Triton 3.6; causal, batch 1, 16 heads; length 16 384 in bfloat16, 4096 in
float32): milliseconds of one kernel, median of 11 (5 in float32) with the L2 cache flushed, by "queries × keys, warps,
stages". Runs differ by up to a tenth; 430 cases were tried, among them more stages, fewer registers per thread, other
orders of the products, and each product's mirror image.

    bfloat16
    16   forward   64 × 128, 4, 3: 0.88    64 × 64, 4, 3: 0.92
    16   keys      128 × 64, 4, 3: 1.22    64 × 64, 4, 2: 1.36
    16   queries   64 × 128, 4, 3: 0.90    64 × 64, 4, 3: 0.95
    16   one pass  128 × 64, 4, 3: 1.81    64 × 64, 4, 3: 1.92
    32   forward   64 × 128, 4, 3: 0.95    64 × 64, 4, 3: 1.03
    32   keys      128 × 64, 4, 3: 1.40    64 × 128, 4, 3: 1.57
    32   queries   64 × 64, 4, 3: 0.96     64 × 128, 4, 3: 0.98
    32   one pass  128 × 64, 4, 3: 2.14    64 × 64, 4, 3: 2.46
    64   forward   64 × 128, 4, 3: 1.17    64 × 64, 4, 3: 1.29    128 × 64, 4, 3: 1.37    128 × 128, 8, 3: 1.50
    64   keys      128 × 64, 4, 2: 1.85    64 × 64, 4, 2: 2.14    128 × 128, 8, 2: 2.57   64 × 128, 8, 2: 3.05
    64   queries   64 × 64, 4, 3: 1.31     64 × 128, 4, 3: 1.41   128 × 64, 8, 3: 1.39    128 × 64, 4, 3: 1.46
    64   one pass  64 × 64, 4, 3: 3.50     128 × 128, 8, 2: 3.72
    128  forward   64 × 64, 4, 3: 2.02     128 × 128, 8, 3: 2.10  128 × 64, 8, 4: 2.25    64 × 128, 4, 3: 2.48
    128  keys      64 × 64, 4, 2: 3.52     64 × 128, 8, 3: 3.98   128 × 128, 8, 2: 4.16   32 × 64, 4, 2: 4.32
    128  queries   128 × 64, 8, 3: 2.56    64 × 128, 4, 3: 2.74   64 × 64, 4, 2: 2.82     128 × 128, 8, 2: 2.83
    128  one pass  64 × 128, 8, 2: 7.16    32 × 64, 4, 2: 7.43
    256  forward   128 × 64, 8, 2: 3.99    128 × 32, 8, 3: 4.60   64 × 32, 4, 3: 5.29
    256  keys      64 × 64, 8, 2: 15.3     32 × 64, 8, 3: 17.2    32 × 64, 8, 2: 20.0
    256  queries   128 × 32, 8, 2: 7.15    64 × 32, 4, 2: 9.69    64 × 64, 8, 2: 11.1
    256  one pass  32 × 64, 8, 2: 31.6     32 × 64, 8, 1: 51.4
    float32, three tf32 products / one
    64   forward   64 × 64, 4, 2: 0.89 / 0.41   64 × 32, 4, 2: 1.00 / 0.44
    64   keys      32 × 32, 4, 2: 2.21 / 0.70   32 × 64, 4, 2: 2.29 / 0.81
    64   queries   64 × 32, 4, 2: 1.12 / 0.50   32 × 32, 4, 2: 1.63 / 0.62
    128  forward   32 × 32, 4, 2: 2.45 / 0.91   64 × 32, 4, 2: 3.05 / 1.13
    128  keys      32 × 32, 4, 2: 15.5 / 2.28   32 × 64, 8, 2: 16.3 / 2.79
    128  queries   64 × 32, 8, 2: 7.73 / 2.04   32 × 32, 4, 2: 11.5 / 1.18

The backward pass in one pass wins up to head dimension 32; from 64 on two passes do, though they compute seven products
instead of five. Nsight Compute at 64: the tensor cores are busy 40% of the time in one pass, 62% in the pass over keys.
Triton 3.6 waits for each product at once, so they rest while a program computes exponentials unless another program on
the same multiprocessor fills the gap; dQ's product takes registers and shared memory from it, and its reductions keep
the L2 cache busy for 70% of the time.

Elsewhere the sizes are chosen to fit: no other device was measured. The small ones need at most 99 KiB of shared
memory, what Ada and consumer Blackwell have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.triton_tiles import Tiling, capability, has_tensor_descriptors


@dataclass(frozen=True)
class Tilings:
    """One tiling for each kernel, and the faster form of the backward pass."""

    forward: Tiling
    keys: Tiling
    queries: Tiling
    one_pass: Tiling
    prefer_one_pass: bool = False


LARGE_HALF = {
    16: Tilings(Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 3), Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 3), True),
    32: Tilings(Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(128, 64, 4, 3), True),
    64: Tilings(Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
    128: Tilings(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 2)),
    256: Tilings(Tiling(128, 64, 8, 2), Tiling(64, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(32, 64, 8, 2)),
}
"""Half precision where a multiprocessor has 227 KiB of shared memory (Hopper, data-centre Blackwell), by width."""

_UP_TO_64 = Tilings(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2))
SMALL_HALF = {
    16: _UP_TO_64,
    32: _UP_TO_64,
    64: _UP_TO_64,
    128: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2)),
    256: Tilings(Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 1)),
}
"""Half precision elsewhere."""

_SINGLE_UP_TO_64 = Tilings(Tiling(64, 64, 4, 2), Tiling(32, 32, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2))
LARGE_SINGLE = {
    16: _SINGLE_UP_TO_64,
    32: _SINGLE_UP_TO_64,
    64: _SINGLE_UP_TO_64,
    128: Tilings(Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(64, 32, 8, 2), Tiling(16, 32, 4, 1)),
    256: Tilings(Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
"""Single precision where a multiprocessor has 227 KiB."""

SMALL_SINGLE = LARGE_SINGLE | {
    128: Tilings(Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
}
"""Single precision elsewhere. One pass at 256 does not fit below 128 KiB; it is taken nowhere unless asked for."""


_remembered: dict[tuple[object, ...], Tilings] = {}


def remember(q: Tensor, width: int, precision: str, tilings: Tilings) -> None:
    """Let `choose` give these, in this process, for tensors like q (see triton_tuning)."""
    _remembered[_key(q, width, precision)] = tilings


def forget() -> None:
    """Let `choose` give what the tables say, and nothing else."""
    _remembered.clear()


def choose(q: Tensor, width: int, precision: str) -> Tilings:
    """For tensors like q, whose head dimension is `width` when rounded up to a power of two.

    What was tuned in this process, else what the tables say.
    """
    if _remembered and (tuned := _remembered.get(_key(q, width, precision))):
        return tuned
    return from_tables(q, width)


def from_tables(q: Tensor, width: int) -> Tilings:
    """As `choose`, whatever was tuned."""
    large = capability(q.device) in ((9, 0), (10, 0), (10, 3))
    if q.dtype == torch.float32:
        return (LARGE_SINGLE if large else SMALL_SINGLE)[width]
    return (LARGE_HALF if large else SMALL_HALF)[width]


def _key(q: Tensor, width: int, precision: str) -> tuple[object, ...]:
    """What decides whether a tiling fits."""
    return q.device, q.dtype, width, precision, has_tensor_descriptors(q)
