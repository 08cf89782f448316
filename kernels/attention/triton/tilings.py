"""Sizes of tiles for each device, precision and head dimension.

Those for an H200 were the fastest of 550 that a search timed (docs/decisions/0011-tiles-of-triton-attention.md).
On other devices, which were not measured, the sizes are chosen to fit: they need at most 99 KiB of shared memory, the
size in Ada and consumer Blackwell. `tests/kernels/test_triton_fits.py` compiles them for several devices.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .inputs import capability


@dataclass(frozen=True)
class Tiling:
    """Sizes of one kernel's tiles, with the warps and stages of its programs."""

    queries: int
    """Rows of a tile of queries."""
    keys: int
    """Rows of a tile of keys and values."""
    warps: int
    stages: int
    """Tiles that the inner loop has in shared memory: one in use, the others being fetched."""
    hold: bool = False
    """True keeps a program's own tile in registers instead of shared memory. The pass over keys has no registers to
    spare and ignores it. So does everything with a Triton that is not verified: 3.8 compiles a held tile of 64 x 64 for
    Hopper to wrong products.
    """

    def launch_options(self) -> dict[str, int]:
        """The tiling as keyword arguments of a kernel's launch."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


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
CAPPED_QUERIES = 64
"""Most queries of a tile in the pass over keys with a soft cap, on Hopper, from width 64 on: with 128, ptxas spills 1.2
KB of each thread's registers, with 64 none, and the backward pass takes 0.82 of the time (docs/decisions/0011)."""

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
"""Single precision in registers, on all devices. One pass at 256 takes 128 KiB; no call uses it."""


def padded_width(head_dim: int) -> int:
    """Columns of a tile: the head dimension rounded up to a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision_of(q: Tensor, tf32: bool) -> str:
    """Return the precision of products, by the names of `launch`; half precision has only one."""
    if q.dtype != torch.float32:
        return "ieee"
    return "tf32" if tf32 else exact_precision(q.device, padded_width(q.shape[-1]))


def exact_precision(device: torch.device, width: int) -> str:
    """Return the precision of exact float32 products: "split". If its tiles do not fit the device, operands are split
    in registers, and tensor cores add the products up; operands.add_product describes the loss.
    """
    return "split" if _is_large(device) or width in SMALL_SPLIT else "tf32x3"


def choose(device: torch.device, width: int, precision: str, capped: bool = False) -> Tilings:
    """Return the tilings of launches on a device.

    `width` is the head dimension rounded up to a power of two; `capped` tells whether scores have a soft cap.
    """
    if precision == "split":
        return (LARGE_SPLIT if _is_large(device) else SMALL_SPLIT)[width]
    if precision != "ieee":
        return TF32[width]
    tilings = (LARGE_HALF if _is_large(device) else SMALL_HALF)[width]
    if not (capped and width >= 64):
        return tilings
    keys, one_pass = (
        replace(tiling, queries=min(tiling.queries, CAPPED_QUERIES)) for tiling in (tilings.keys, tilings.one_pass)
    )
    return replace(tilings, keys=keys, one_pass=one_pass)


def _is_large(device: torch.device) -> bool:
    """Return True for a Hopper, whose multiprocessors have 227 KiB of shared memory, and products that read it.

    Data-centre Blackwell has as much, but its products also need tensor memory: the large tilings do not fit.
    """
    return capability(device) == (9, 0)
