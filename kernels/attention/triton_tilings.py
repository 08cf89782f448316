"""Sizes of tiles for each device, precision and head dimension, and the measurements that chose them.

Measured on an H200 on 2026-11-21 (torch 2.11, Triton 3.6; causal, batch 1, 16 heads; length 16 384 in bfloat16, 4096 in
float32): milliseconds of one kernel, median of 7 to 11 (5 in float32) with the L2 cache flushed, by "queries × keys,
warps, stages", and "held" (see Tiling). Runs differ by up to a tenth; 550 cases were tried, among them more stages,
fewer registers per thread, other orders of the products, and each product's mirror image.

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
    64   queries   held, 64 × 64, 4, 3: 1.33                      64 × 64, 4, 3: 1.36     64 × 128, 4, 3: 1.46
    64   one pass  64 × 64, 4, 3: 3.50     128 × 128, 8, 2: 3.72
    128  forward   held, 64 × 64, 4, 3: 1.91                      64 × 64, 4, 3: 2.04     128 × 128, 8, 3: 2.06
    128  keys      64 × 64, 4, 2: 3.52     64 × 128, 8, 3: 3.98   128 × 128, 8, 2: 4.16   32 × 64, 4, 2: 4.32
    128  queries   held, 64 × 64, 4, 3: 2.30                      128 × 64, 8, 3: 2.53    64 × 128, 4, 3: 2.74
    128  one pass  64 × 128, 8, 2: 7.16    32 × 64, 4, 2: 7.43
    256  forward   held, 64 × 32, 4, 3: 3.83                      128 × 64, 8, 2: 3.96    128 × 32, 8, 3: 4.60
    256  keys      64 × 64, 8, 2: 15.3     32 × 64, 8, 3: 17.2    32 × 64, 8, 2: 20.0
    256  queries   128 × 32, 8, 2: 7.15    64 × 32, 4, 2: 9.69    64 × 64, 8, 2: 11.1
    256  one pass  32 × 64, 8, 2: 31.6     32 × 64, 8, 1: 51.4
    float32, split (see triton_operands)
    16   forward   64 × 64, 4, 2: 0.26     64 × 128, 4, 2: 0.27
    16   keys      32 × 64, 4, 3: 0.50     64 × 64, 4, 2: 0.51
    16   queries   64 × 64, 4, 2: 0.28     64 × 128, 4, 2: 0.31
    16   one pass  64 × 64, 4, 2: 0.64     32 × 64, 4, 2: 0.84
    32   forward   64 × 64, 4, 2: 0.31     64 × 128, 4, 2: 0.31
    32   keys      64 × 64, 4, 2: 0.61     32 × 64, 4, 2: 0.64
    32   queries   64 × 64, 4, 2: 0.38     64 × 128, 4, 2: 0.56
    32   one pass  64 × 64, 4, 2: 0.78     32 × 64, 4, 2: 1.03
    64   forward   64 × 32, 4, 2: 0.53     128 × 64, 8, 2: 0.58   64 × 64, 4, 2: 0.71
    64   keys      64 × 128, 8, 2: 0.97    32 × 64, 4, 2: 1.06    64 × 64, 4, 2: 1.14     16 × 64, 4, 2: 1.54
    64   queries   64 × 32, 4, 2: 0.82     64 × 64, 4, 2: 0.89    64 × 32, 4, 3: 1.16
    64   one pass  32 × 128, 8, 2: 1.94    32 × 64, 4, 2: 2.20
    128  forward   128 × 32, 8, 2: 1.15    64 × 64, 4, 1: 1.17    64 × 32, 4, 2: 1.35     64 × 16, 4, 2: 1.40
    128  keys      32 × 64, 4, 2: 3.14     16 × 64, 4, 2: 4.92    32 × 64, 4, 1: 5.00
    128  queries   64 × 32, 4, 2: 1.83     64 × 16, 4, 3: 2.64    64 × 16, 4, 2: 2.86
    128  one pass  16 × 64, 4, 2: 7.55     16 × 64, 4, 1: 10.6
    256  forward   64 × 16, 4, 2: 4.52     64 × 16, 4, 1: 8.84
    256  keys      16 × 16, 4, 2: 77.3     16 × 16, 4, 1: 269
    256  queries   64 × 16, 4, 1: 12.5     16 × 16, 4, 2: 26.2
    float32, products of tf32
    64   forward   64 × 64, 4, 2: 0.41     64 × 32, 4, 2: 0.44
    64   keys      32 × 32, 4, 2: 0.70     32 × 64, 4, 2: 0.81
    64   queries   64 × 32, 4, 2: 0.50     32 × 32, 4, 2: 0.62
    128  forward   32 × 32, 4, 2: 0.91     64 × 32, 4, 2: 1.13
    128  keys      32 × 32, 4, 2: 2.28     32 × 64, 8, 2: 2.79
    128  queries   32 × 32, 4, 2: 1.18     64 × 32, 8, 2: 2.04

The backward pass in one pass wins up to head dimension 32; from 64 on two passes do, though they compute seven products
instead of five. Nsight Compute at 64: the tensor cores are busy 40% of the time in one pass, 62% in the pass over keys.
Triton 3.6 waits for each product at once, so they rest while a program computes exponentials unless another program on
the same multiprocessor fills the gap; dQ's product takes registers and shared memory from it, and its reductions keep
the L2 cache busy for 70% of the time.

Exact products of float32 that split operands in registers (Triton's "tf32x3") take, at 64, 0.89, 2.19 and 1.14 for
forward, keys and queries; at 128, 2.42, 15.5 and 7.72. They spill.

Elsewhere the sizes are chosen to fit: no other device was measured. The small ones need at most 99 KiB of shared
memory, what Ada and consumer Blackwell have; `tests/kernels/test_triton_fits.py` compiles them for several devices.
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
    64: Tilings(Tiling(64, 128, 4, 3), Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 3, True), Tiling(64, 64, 4, 3)),
    128: Tilings(Tiling(64, 64, 4, 3, True), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3, True), Tiling(64, 128, 8, 2)),
    256: Tilings(Tiling(64, 32, 4, 3, True), Tiling(64, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(32, 64, 8, 2)),
}
"""Half precision on Hopper, where a multiprocessor has 227 KiB of shared memory, by width."""

_UP_TO_64 = Tilings(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2))
SMALL_HALF = {
    16: _UP_TO_64,
    32: _UP_TO_64,
    64: _UP_TO_64,
    128: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2)),
    256: Tilings(Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 1)),
}
"""Half precision elsewhere."""

LARGE_SPLIT = {
    16: Tilings(Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), True),
    32: Tilings(Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), True),
    64: Tilings(Tiling(64, 32, 4, 2), Tiling(64, 128, 8, 2), Tiling(64, 32, 4, 2), Tiling(32, 128, 8, 2)),
    128: Tilings(Tiling(128, 32, 8, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(16, 64, 4, 2)),
    256: Tilings(Tiling(64, 16, 4, 2), Tiling(16, 16, 4, 2), Tiling(64, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
"""Single precision in parts, on Hopper."""

_SPLIT_UP_TO_32 = Tilings(Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(16, 32, 4, 1))
SMALL_SPLIT = {
    16: _SPLIT_UP_TO_32,
    32: _SPLIT_UP_TO_32,
    64: Tilings(Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    128: Tilings(Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 1)),
}
"""The same elsewhere. At 256, the smallest tiles do not fit."""

_TF32_UP_TO_64 = Tilings(Tiling(64, 64, 4, 2), Tiling(32, 32, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2))
TF32 = {
    16: _TF32_UP_TO_64,
    32: _TF32_UP_TO_64,
    64: _TF32_UP_TO_64,
    128: Tilings(Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    256: Tilings(Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
"""Single precision in registers, everywhere. One pass at 256 takes 128 KiB; it is taken nowhere unless asked for."""


def exact_precision(device: torch.device, width: int) -> str:
    """Return the precision of exact float32 products: in parts. Where parts do not fit the device, operands are split
    in registers, and tensor cores add the products up (triton_operands.add_product tells the cost).
    """
    return "split" if _is_large(device) or width in SMALL_SPLIT else "tf32x3"


Operands = tuple[Tensor, Tensor, Tensor]
_remembered: dict[tuple[object, ...], Tilings] = {}


def remember(operands: Operands, width: int, precision: str, tilings: Tilings) -> None:
    """Let `choose` return these tilings, in this process, for such operands (see triton_tuning)."""
    _remembered[_key(operands, width, precision)] = tilings


def forget() -> None:
    """Let `choose` return the tables' tilings only."""
    _remembered.clear()


def choose(operands: Operands, width: int, precision: str) -> Tilings:
    """Choose tilings for q, k and v as launches take them, with the head dimension rounded up to the power of two
    `width`.

    It returns the tilings that were tuned in this process, else the tables'.
    """
    if _remembered and (tuned := _remembered.get(_key(operands, width, precision))):
        return tuned
    return from_tables(operands[0].device, width, precision)


def from_tables(device: torch.device, width: int, precision: str) -> Tilings:
    """Choose the tables' tilings, also if others were tuned."""
    if precision == "ieee":
        return (LARGE_HALF if _is_large(device) else SMALL_HALF)[width]
    if precision == "split":
        return (LARGE_SPLIT if _is_large(device) else SMALL_SPLIT)[width]
    return TF32[width]


def _key(operands: Operands, width: int, precision: str) -> tuple[object, ...]:
    """Return the key of remembered tilings: all that decides if a tiling fits."""
    q = operands[0]
    return q.device, q.dtype, width, precision, all(has_tensor_descriptors(tensor) for tensor in operands)


def _is_large(device: torch.device) -> bool:
    """Return True for a Hopper, whose multiprocessors have 227 KiB of shared memory, and products that read it.

    Data-centre Blackwell has as much, but its products also need tensor memory: the large tilings do not fit.
    """
    return capability(device) == (9, 0)
