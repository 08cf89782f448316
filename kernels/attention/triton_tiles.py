"""Shared by the Triton kernels of attention: tiles in memory, the order of programs, and the sizes of tiles.

A tile is a block of consecutive rows (queries or keys) of one head. Its rows are `WIDTH` wide, the head dimension
rounded up to a power of two, since that is what Triton's tensors are: columns past the head dimension are zero in
registers and take no room in the inputs' and results' memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interpreted import mend_interpreter

mend_interpreter()


@dataclass(frozen=True)
class Tiling:
    """Sizes of one kernel's tiles, with the warps and stages of its programs."""

    queries: int
    """Rows of a tile of queries."""
    keys: int
    """Rows of a tile of keys and values."""
    warps: int
    stages: int
    """Tiles that the inner loop keeps in shared memory: one in use, the others on their way."""
    hold: bool = False
    """True keeps a program's own tile in registers instead of shared memory. The pass over keys has no registers to
    spare and ignores it.
    """

    def launch_options(self) -> dict[str, int]:
        """The tiling as keyword arguments of a kernel's launch."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) for the CPU, where the interpreter runs."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_tensor_descriptors(tensor: Tensor) -> bool:
    """Return True if the copy engine of Hopper and later can fetch tiles of this (batch, heads, rows, head_dim) tensor.

    It needs addresses and steps that are multiples of 16 bytes. Kernels read other tensors through pointers.
    """
    return (
        capability(tensor.device) >= (9, 0)
        and tensor.data_ptr() % 16 == 0
        and steps_allow_descriptors(tensor.shape, tensor.stride(), tensor.element_size())
    )


@functools.lru_cache(maxsize=1024)
def steps_allow_descriptors(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> bool:
    """Return True if the steps of all axes but the last are multiples of 16 bytes, where they are taken."""
    steps = [step for size, step in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return all(step > 0 and step * element_size % 16 == 0 for step in steps)


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(ROWS, WIDTH) of a head from row `start` on; zero past `length` rows and HEAD_DIM columns.

    `source` is a descriptor if TMA, else a pointer, to be read with the strides (batch, head, row).
    """
    if TMA:
        tile = source.load([batch, head, start, 0]).reshape(ROWS, WIDTH)
    else:
        rows = start + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        inside = (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
        tile = tl.load(_addresses(source, strides, batch, head, rows, columns), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    target, strides, batch, head, start, length, tile,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The reverse of `load_tile` through a pointer, in the target's dtype."""
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    addresses = _addresses(target, strides, batch, head, rows, columns)
    tl.store(addresses, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _addresses(pointer, strides, batch, head, rows, columns):
    start = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return start + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :]


@triton.jit
def program(tiles, heads):
    """(tile, head, batch) of this program: the tiles of a head run together, so that they share what is in the L2."""
    index = tl.program_id(0)
    return index % tiles, index // tiles % heads, index // tiles // heads
