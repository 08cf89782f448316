"""Barriers of the Hopper kernels, and a reduction that Gluon 3.6 lacks.

By named barriers of the hardware, consumers of one program take turns. One is met by 256 threads: the 128 that wait for
their turn, and the 128 whose turn ends. Triton gives the barriers below 8 to its own partitions.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each of which opens after that many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(each), count=ARRIVALS)
    return barriers


@gluon.jit
def await_turn(token, WHO: gl.constexpr):
    """Wait until consumer WHO may issue its products. The token keeps the order of instructions."""
    if WHO == 0:
        return gl.inline_asm_elementwise(
            "bar.sync 9, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    elif WHO == 1:  # noqa: RET505 - Gluon compiles one of the branches, and nothing behind a return
        return gl.inline_asm_elementwise(
            "bar.sync 10, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "bar.sync 11, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def give_turn(token, WHO: gl.constexpr):
    """Let consumer WHO have its turn."""
    if WHO == 0:
        return gl.inline_asm_elementwise(
            "bar.arrive 9, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    elif WHO == 1:  # noqa: RET505
        return gl.inline_asm_elementwise(
            "bar.arrive 10, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "bar.arrive 11, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def meet(token):
    """Wait until both consumers of a program are here."""
    return gl.inline_asm_elementwise(
        "bar.sync 12, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@builtin
def add_through_copy_engine(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to a tensor, asynchronously, as `tma.async_copy_shared_to_global` copies one."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )
