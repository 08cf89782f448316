"""Named barriers of the hardware, and what else Gluon lacks.

Triton has barriers 0 and 1, and those up to 4 for three partitions. Forward: 9 to 11 are turns of the consumers (128
threads wait, 128 arrive), and nobody waits at 12 and 13. Backward: 5 to 8 are what a consumer tells the other (128
wait, 128 arrive), 9 and 10 hand dQ on (a consumer's 128 threads and the adder's 32), 11 to 14 free tiles (256 and the
producer's 32), and at 15 both consumers wait.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

SCALED = gl.constexpr(
    "{ .reg .pred any; setp.neu.f32 any, $256, 1.0; setp.neu.or.f32 any, $258, 1.0, any; "
    "vote.sync.any.pred any, any, -1;"
    + "".join(f" mov.f32 ${each}, ${128 + each};" for each in range(128))
    + " @!any bra done;"
    + "".join(f" mul.f32 ${each}, ${each}, ${256 + each % 4};" for each in range(128))
    + " done: }"
)
"""Of a thread's 128 numbers, two in turn are of one row, and two of another."""
SCALED_OPERANDS = gl.constexpr(",".join(["=f"] * 128 + ["f"] * 256))


@gluon.jit
def wait_at(token, barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until so many threads are there. The token keeps the order of instructions."""
    return gl.inline_asm_elementwise(
        f"bar.sync $2, {THREADS}; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_at(token, barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier, each thread on its own, and go on. Before a barrier in memory, Gluon lets all threads
    of a consumer wait for each other."""
    return gl.inline_asm_elementwise(
        f"bar.arrive $2, {THREADS}; mov.b32 $0, $1;", "=r,r,r", [token, barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def computed_here(x, BARRIER: gl.constexpr):
    """Keep ptxas from moving a wait for a product that stands behind this before the computation of `x`.

    ptxas keeps the order of that wait and of arrivals at a barrier, at which nobody waits, and which depends on `x`.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred always; setp.leu.f32 always, $1, 0f7F800000; "
        f"@always bar.arrive {BARRIER}, 128; mov.b32 $0, 0; }}",
        "=r,f", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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

    Where a loop carries the weights, Gluon's own conversion takes one more instruction for each two, to swap them.
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
def scaled(x, factors):
    """A product's result, 64 × 256, times its rows' factors; a warp whose factors are all 1 skips it.

    Gluon's own branch would wait at a barrier, to ask all warps.
    """
    return gl.inline_asm_elementwise(SCALED, SCALED_OPERANDS, [x, factors], dtype=gl.float32, is_pure=True, pack=128)


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
