"""The backward pass for head dimension 256, where gradients of 128 keys need more registers than there are.

A program keeps 64 keys. Each of its two consumers computes the scores of half of the queries, and a half of the columns
of dQ, dK and dV; weights and their gradients reach the other consumer through shared memory. dQ is added to the sum in
memory by atomic additions from registers: no shared memory is left to stage it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper.backward import hide, produce, query_tiles
from kernels.attention.hopper.barriers import make_barriers, meet

FOUR_COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
"""Layout of 64 queries × 128 columns in which a thread can add four numbers at once. A product leaves it two columns of
two rows; neighbours exchange them.
"""


@gluon.jit
def visit(
    begin, end, count, token, dk, dv, k, v, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
    q_full, q_empty, do_full, do_empty, numbers_full, start, keys, scale,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """dK and dV after the tiles of queries from `begin` to `end`."""
    PART: gl.constexpr = M // 2
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dq_layout: gl.constexpr = d_layout if TOGETHER == 2 else FOUR_COLUMNS
    dq_rows = gl.arange(0, M, gl.SliceLayout(1, dq_layout))
    dq_columns = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, dq_layout))
    dq_places = dq_rows[:, None] * D + dq_columns[None, :]
    for index in range(begin, end):
        stage = count % 2
        phase = (count // 2) & 1
        q = q_tiles.index(stage).reshape([M, D])
        do = do_tiles.index(stage).reshape([M, D])
        zeros = gl.zeros([N, PART], gl.float32, s_layout)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k, q.slice(WHO * PART, PART, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v, do.slice(WHO * PART, PART, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(numbers_full.index(stage), phase)
        exponent = numbers.index(stage * 2).slice(WHO * PART, PART, 0).load(column_layout)
        delta = numbers.index(stage * 2 + 1).slice(WHO * PART, PART, 0).load(column_layout)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale - exponent[None, :])
        if MASKED:
            p = hide(p, start, index * M + WHO * PART, keys, CAUSAL)
        p_tiles.index(stage).slice(WHO * PART, PART, 1).store(p.to(q_tiles.dtype))
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds_tiles.index(stage).slice(WHO * PART, PART, 1).store((p * (dp - delta[None, :])).to(q_tiles.dtype))
        fence_async_shared()
        token = meet(token)
        ds = ds_tiles.index(stage)
        dq_zeros = gl.zeros([M, HALF], gl.float32, d_layout)
        dq = warpgroup_mma(ds.permute((1, 0)), k.slice(WHO * HALF, HALF, 1), dq_zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma(p_tiles.index(stage), do.slice(WHO * HALF, HALF, 1), dv, is_async=True)
        dk = warpgroup_mma(ds, q.slice(WHO * HALF, HALF, 1), dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq])
        gl.atomic_add(dq_sum + index * (M * D) + dq_places, gl.convert_layout(dq, dq_layout), sem="relaxed")
        dv = warpgroup_mma_wait(1, deps=[dv])
        mbarrier.arrive(do_empty.index(stage), count=1)
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_empty.index(stage), count=1)
        count += 1
    return count, token, dk, dv


@gluon.jit
def consume(
    dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
    start, batch, key_head, heads, group, queries, keys, padded, scale, root,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    k = k_tiles.reshape([N, D])
    v = v_tiles.reshape([N, D])
    dk = gl.zeros([N, HALF], gl.float32, d_layout)
    dv = gl.zeros([N, HALF], gl.float32, d_layout)
    first, free, end = query_tiles(start, queries, keys, M, N, CAUSAL)
    count = 0
    token = start
    mbarrier.wait(kv_full.index(0), 0)
    for member in range(group):
        plane_sum = dq_sum + (batch * heads + key_head * group + member).to(gl.int64) * padded * D
        count, token, dk, dv = visit(
            first, free, count, token, dk, dv, k, v, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, plane_sum,
            q_full, q_empty, do_full, do_empty, numbers_full, start, keys, scale, WHO, M, N, D, CAUSAL, True, TOGETHER,
        )  # fmt: skip
        count, token, dk, dv = visit(
            gl.maximum(first, free), end, count, token, dk, dv, k, v, q_tiles, do_tiles, p_tiles, ds_tiles, numbers,
            plane_sum, q_full, q_empty, do_full, do_empty, numbers_full, start, keys, scale,
            WHO, M, N, D, CAUSAL, False, TOGETHER,
        )  # fmt: skip
    meet(token)  # the other consumer has read the tiles of queries for the last time
    dk_room = q_tiles._reinterpret(q_tiles.dtype, [4, 1, 1, N, HALF], dk_out.layout).index(WHO)
    dv_room = do_tiles._reinterpret(q_tiles.dtype, [4, 1, 1, N, HALF], dv_out.layout).index(WHO)
    dk_room.reshape([N, HALF]).store((dk * root).to(q_tiles.dtype))
    dv_room.reshape([N, HALF]).store(dv.to(q_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [batch, key_head, start, WHO * HALF], dk_room)
    tma.async_copy_shared_to_global(dv_out, [batch, key_head, start, WHO * HALF], dv_room)
    tma.store_wait(0)


@gluon.jit
def consume_first(
    dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
    start, batch, key_head, heads, group, queries, keys, padded, scale, root,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    consume(
        dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
        kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
        start, batch, key_head, heads, group, queries, keys, padded, scale, root, 0, M, N, D, CAUSAL, TOGETHER,
    )  # fmt: skip


@gluon.jit
def consume_second(
    dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
    start, batch, key_head, heads, group, queries, keys, padded, scale, root,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    consume(
        dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
        kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
        start, batch, key_head, heads, group, queries, keys, padded, scale, root, 1, M, N, D, CAUSAL, TOGETHER,
    )  # fmt: skip


# One kernel for all lengths: compiling takes ten seconds.
@gluon.jit(do_not_specialize=["heads", "key_heads", "group", "queries", "keys", "padded"])
def wide_backward_kernel(
    q, k, v, do, exponents, deltas, dq_sum, dk_out, dv_out, heads, key_heads, group, queries, keys, padded, scale, root,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `backward_kernel`; `dq_sum` is a pointer."""
    tiles = (keys + N - 1) // N
    program = gl.program_id(0)
    start = program % tiles * N
    key_head = program // tiles % key_heads
    batch = program // tiles // key_heads
    k_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, N, D], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], do.layout)
    # Each consumer writes half of the columns: a swizzle of that width.
    part_layout: gl.constexpr = gl.NVMMASharedLayout(M, 16, 2)
    p_tiles = gl.allocate_shared_memory(q.dtype, [2, N, M], part_layout)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, N, M], part_layout)
    numbers = gl.allocate_shared_memory(gl.float32, [4, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = make_barriers(1, 1)
    q_full = make_barriers(2, 1)
    q_empty = make_barriers(2, 2)
    do_full = make_barriers(2, 1)
    do_empty = make_barriers(2, 2)
    numbers_full = make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize([
        (consume_first, (
            dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
            start, batch, key_head, heads, group, queries, keys, padded, scale, root, M, N, D, CAUSAL, TOGETHER,
        )),
        (consume_second, (
            dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, p_tiles, ds_tiles, numbers, dq_sum,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
            start, batch, key_head, heads, group, queries, keys, padded, scale, root, M, N, D, CAUSAL, TOGETHER,
        )),
        (produce, (
            q, k, v, do, exponents, deltas, k_tiles, v_tiles, q_tiles, do_tiles, numbers,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
            start, batch, key_head, heads, group, queries, keys, padded, M, N, CAUSAL,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
