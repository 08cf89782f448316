"""Named barriers of the hardware, by which consumers of one program take turns, and what else Gluon lacks.

A named barrier is met by 256 threads: the 128 that wait for their turn, and the 128 whose turn ends. Triton gives the
barriers below 8 to its own partitions.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


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


@gluon.jit
def tell_producer(token, barrier):
    """Arrive at a barrier of both consumers and the producer's warp, without waiting. Before each arrival at a barrier
    in memory, Gluon lets a consumer's threads wait for each other; here each arrives on its own."""
    return gl.inline_asm_elementwise(
        "bar.arrive $2, 288; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def hear_consumers(token, barrier):
    """Wait at such a barrier for both consumers."""
    return gl.inline_asm_elementwise(
        "bar.sync $2, 288; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tell_adder(token, barrier):
    """Arrive at a barrier of one consumer and the warp that adds dQ up, without waiting."""
    return gl.inline_asm_elementwise(
        "bar.arrive $2, 160; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def hear_consumer(token, barrier):
    """Wait at such a barrier for the consumer."""
    return gl.inline_asm_elementwise(
        "bar.sync $2, 160; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def after_the_kernel_before(token):
    """Wait until the kernel that was launched before has ended, and let the one behind start and wait in turn.

    For kernels that are launched with `launch_pdl`, whose own preparation so overlaps with the kernel before.
    """
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def known_late():
    """0, which the compiler does not know.

    A tile that is addressed with it is addressed in each turn of a loop. Otherwise the compiler keeps the addresses of
    all steps of its products in registers, 64 in the backward pass, and spills what is needed more.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def along_rows(a, b, zeros, REST: gl.constexpr):
    """The product of `a` with the transposed `b`, not waited for.

    If REST is not 0, only the first half of the columns and as many more are multiplied, as two products.
    """
    if REST == 0:
        s = warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = a.shape[1] // 2
        s = warpgroup_mma(a.slice(0, HALF, 1), b.slice(0, HALF, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma(a.slice(HALF, REST, 1), b.slice(HALF, REST, 1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """`x` as bfloat16 or float16, by one instruction for two numbers.

    Gluon's conversion of weights that a loop carries costs another instruction for each two, which swaps them.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:  # noqa: RET505
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def sums_by_thread(x):
    """[rows, 8]: the sums of every eighth column of a product's result, which a thread adds without asking others."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@builtin
def add_through_copy_engine(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to a tensor, asynchronously, as `tma.async_copy_shared_to_global` copies one."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )
