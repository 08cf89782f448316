"""Selects the tilings of attention's Triton kernels that are worth compiling on a device, for given inputs.

It leaves out tilings that do not fit, or whose threads would be idle. Estimates are lower bounds: Triton, which counts
exactly, may still refuse a selected tiling, but only once it has compiled it (a second per tiling).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.attention.triton_operands import PARTS
from kernels.attention.triton_tiles import Tiling, capability

ROWS = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)

REGISTERS = 255
"""Registers of 32 bits that the hardware gives a thread."""
SCORES_PER_THREAD = {4: 2, 8: 8}
"""Least elements of a tile of scores for each thread, by warps: with fewer, warps wait for each other."""
HELD = {"forward": 1, "queries": 2}
"""Number of tiles of queries that a kernel can hold in registers."""
UNLIMITED = 1 << 40
"""Shared memory where the interpreter runs."""


@dataclass(frozen=True)
class Limits:
    """The limits of a device, which candidates must fit."""

    shared_bytes: int
    """Shared memory that one program may have."""
    element_bytes: int
    """Bytes of an operand's element, all its parts together."""
    width: int
    """Columns of a tile."""
    queries: int
    keys: int
    asynchronous_products: bool
    """True if tensor cores read operands from shared memory (Hopper, in half precision and in parts of it)."""
    can_hold: bool
    """True if tiles can be held in registers instead (see Tiling)."""


def limits(q: Tensor, k: Tensor, width: int, precision: str) -> Limits:
    """Return the limits for operands (see triton_launch): queries and keys, each with two axes before their rows."""
    shared = UNLIMITED
    if q.device.type == "cuda":
        shared = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    split = precision == "split"
    asynchronous = capability(q.device)[0] == 9 and q.element_size() == 2
    return Limits(
        shared, q.element_size() * (PARTS if split else 1), width, q.shape[2], k.shape[2],
        asynchronous, asynchronous and not split,
    )  # fmt: skip


def candidates(kernel: str, limit: Limits) -> tuple[Tiling, ...]:
    """Yield the tilings of one kernel, named as in `Tilings`, that may be fast."""
    grid = itertools.starmap(Tiling, itertools.product(ROWS, ROWS, WARPS, STAGES, (False, True)))
    return tuple(tiling for tiling in grid if why_pruned(kernel, tiling, limit) is None)


def why_pruned(kernel: str, tiling: Tiling, limit: Limits) -> str | None:
    """Say why a tiling is not worth compiling; None if it is."""
    if tiling.queries > _covering(limit.queries) or tiling.keys > _covering(limit.keys):
        return "a tile is larger than what there is to do"
    if tiling.hold and not (limit.can_hold and kernel in HELD):
        return "no tile can be held"
    walked, step = (limit.queries, tiling.queries) if kernel in ("keys", "one_pass") else (limit.keys, tiling.keys)
    if tiling.stages > max(1, triton.cdiv(walked, step)):
        return "more stages than the loop has tiles"
    if tiling.queries * tiling.keys < SCORES_PER_THREAD[tiling.warps] * 32 * tiling.warps:
        return "too little for so many warps"
    registers = registers_needed(kernel, tiling, limit)
    if registers > REGISTERS:
        return f"at least {registers} registers per thread, of {REGISTERS}"
    shared = shared_bytes_needed(kernel, tiling, limit)
    if shared > limit.shared_bytes:
        return f"at least {shared} bytes of shared memory, of {limit.shared_bytes}"
    return None


def registers_needed(kernel: str, tiling: Tiling, limit: Limits) -> int:
    """Return the registers per thread: for sums and current products, in float32, and for the tiles that it holds."""
    scores, width = tiling.queries * tiling.keys, limit.width
    held = HELD.get(kernel, 0) * tiling.hold * tiling.queries * width * limit.element_bytes // 4
    elements = {
        "forward": tiling.queries * width + scores,
        "queries": tiling.queries * width + 2 * scores,
        "keys": 2 * tiling.keys * width + 2 * scores,
        "one_pass": 2 * tiling.keys * width + 2 * scores + tiling.queries * width,
    }[kernel]
    return (elements + held) // (32 * tiling.warps)


def shared_bytes_needed(kernel: str, tiling: Tiling, limit: Limits) -> int:
    """Return the shared memory of one program: tiles that wait for the loop, and tiles that stay for the tensor cores.

    It was compared with the memory that Triton 3.6 takes for compute capabilities 8.9, 9.0 and 10.0 in 250 cases, and
    is a lower bound wherever tens of KiB are needed. Where operands pass through registers, the loop's current tile has
    left shared memory, those that stay may have, and of the two streams of tiles one may not be fetched ahead.
    """
    row = limit.width * limit.element_bytes
    upright = kernel in ("keys", "one_pass")  # tiles of keys stay, and are the products' left operands
    stays, walks = (tiling.keys, tiling.queries) if upright else (tiling.queries, tiling.keys)
    if limit.asynchronous_products and stays >= 64:
        kept = {"forward": 1, "keys": 2, "queries": 2, "one_pass": 2}[kernel] * stays * row
        kept *= not tiling.hold
        return kept + (walks * row if tiling.stages == 1 else 2 * tiling.stages * walks * row)
    return max(1, tiling.stages - 1) * walks * row


def _covering(length: int) -> int:
    """Return the smallest tile that holds `length` rows."""
    return max(ROWS[0], 1 << (length - 1).bit_length())
