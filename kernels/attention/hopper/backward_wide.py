"""The backward pass for head dimension 256, where adding dQ up in memory takes longer than computing scores twice.

One kernel keeps a tile of keys and gives dK and dV, another keeps tiles of queries and gives dQ: seven products instead
of five, no additions to memory, and the same bits in every run.

In the keys' kernel the consumers have roles, since gradients of 64 keys are all that the registers of one hold: the
first computes weights P and dV, the second dP, dS and dK. P goes from one to the other through shared memory. In the
queries' kernel each consumer has queries of its own, as in the forward pass.

See kernels.attention.hopper.backward for the tiles that stand upright, and kernels.attention.triton.kernels for the
formulas, and for `exponents` and `deltas`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward import hide, own_spans, query_tiles
from .barriers import after_the_kernel_before, along_rows, known_late
from .forward import free_tiles, key_tiles, visible
from .visible import span


@gluon.jit
def weigh(
    begin, end, count, weights, dv, k, q_tiles, do_tiles, p_tiles, numbers,
    q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty, low, high, scale,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """(count, weights, dV) after the tiles of queries from `begin` to `end`, whose weights are not multiplied yet."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    for index in range(begin, end):
        stage = count % 2
        phase = (count // 2) & 1
        before = gl.maximum(count - 1, 0)  # the first weights are zero
        mbarrier.wait(do_full.index(before % 2), (before // 2) & 1)
        dv_future = warpgroup_mma(weights, do_tiles.index(before % 2).reshape([M, D]), dv, is_async=True)
        mbarrier.wait(q_full.index(stage), phase)
        q = q_tiles.index(stage).reshape([M, D])
        zeros = gl.zeros([N, M], gl.float32, s_layout)
        s = along_rows(k, q, zeros, REST)
        mbarrier.wait(numbers_full.index(stage), phase)
        exponent = numbers.index(stage * 2).load(column_layout)
        dv = warpgroup_mma_wait(1 if REST == 0 else 2, deps=[dv_future])
        mbarrier.arrive(do_empty.index(before % 2), count=1, pred=count > 0)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(q_empty.index(stage), count=1)
        p = gl.exp2(s * scale - exponent[None, :])
        if MASKED:
            p = hide(p, low, high, index * M, CAUSAL)
        mbarrier.wait(p_empty.index(stage), phase ^ 1)
        p_tiles.index(stage).store(p.to(q_tiles.dtype))
        mbarrier.arrive(p_full.index(stage), count=1)
        weights = gl.convert_layout(p.to(q_tiles.dtype), left_layout)
        count += 1
    return count, weights, dv


@gluon.jit
def differentiate(
    begin, end, count, ds, dk, v, q_tiles, do_tiles, p_tiles, numbers, q_full, q_empty, do_full, do_empty, numbers_full,
    p_full, p_empty,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(count, dS, dK / root) after the tiles of queries from `begin` to `end`, whose dS is not multiplied yet."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    for _index in range(begin, end):
        stage = count % 2
        phase = (count // 2) & 1
        before = gl.maximum(count - 1, 0)  # the first dS is zero
        mbarrier.wait(q_full.index(before % 2), (before // 2) & 1)
        dk_future = warpgroup_mma(ds, q_tiles.index(before % 2).reshape([M, D]), dk, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        do = do_tiles.index(stage).reshape([M, D])
        zeros = gl.zeros([N, M], gl.float32, s_layout)
        dp = along_rows(v, do, zeros, REST)
        dk = warpgroup_mma_wait(1 if REST == 0 else 2, deps=[dk_future])
        mbarrier.arrive(q_empty.index(before % 2), count=1, pred=count > 0)
        mbarrier.wait(numbers_full.index(stage), phase)
        delta = numbers.index(stage * 2 + 1).load(column_layout)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(do_empty.index(stage), count=1)
        mbarrier.wait(p_full.index(stage), phase)
        p = p_tiles.index(stage).load(s_layout)
        mbarrier.arrive(p_empty.index(stage), count=1)
        ds = gl.convert_layout((p.to(gl.float32) * (dp - delta[None, :])).to(q_tiles.dtype), left_layout)
        count += 1
    return count, ds, dk


@gluon.jit
def consume_values(
    dv_out, k_tiles, q_tiles, do_tiles, p_tiles, numbers,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty,
    start, batch, key_head, group, queries, keys, band, scale,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k = k_tiles.reshape([N, D])
    dv = gl.zeros([N, D], gl.float32, d_layout)
    weights = gl.zeros([N, M], q_tiles.dtype, gl.DotOperandLayout(0, d_layout, 2))
    first, free, bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    low, high = own_spans(start, queries, keys, band, CAUSAL, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16]), N)
    count = 0
    mbarrier.wait(kv_full, 0)
    for _member in range(group):
        count, weights, dv = weigh(
            first, free, count, weights, dv, k, q_tiles, do_tiles, p_tiles, numbers, q_full, q_empty, do_full, do_empty,
            numbers_full, p_full, p_empty, low, high, scale, M, N, D, CAUSAL, True, REST,
        )  # fmt: skip
        count, weights, dv = weigh(
            gl.maximum(first, free), bound, count, weights, dv, k, q_tiles, do_tiles, p_tiles, numbers, q_full, q_empty,
            do_full, do_empty, numbers_full, p_full, p_empty, low, high, scale, M, N, D, CAUSAL, False, REST,
        )  # fmt: skip
        if CAUSAL is None:
            count, weights, dv = weigh(
                bound, end, count, weights, dv, k, q_tiles, do_tiles, p_tiles, numbers, q_full, q_empty, do_full,
                do_empty, numbers_full, p_full, p_empty, low, high, scale, M, N, D, CAUSAL, True, REST,
            )  # fmt: skip
    if count > 0:
        mbarrier.wait(do_full.index((count - 1) % 2), ((count - 1) // 2) & 1)
        dv = warpgroup_mma(weights, do_tiles.index((count - 1) % 2).reshape([M, D]), dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=[dv])
    # Only this consumer reads the tile of keys, and the other one that of values: each leaves its results there.
    k.store(dv.to(q_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_out, [batch, key_head, start, 0], k_tiles)
    tma.store_wait(0)


@gluon.jit
def consume_keys(
    dk_out, v_tiles, q_tiles, do_tiles, p_tiles, numbers,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty,
    start, batch, key_head, group, queries, keys, band, root,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    v = v_tiles.reshape([N, D])
    dk = gl.zeros([N, D], gl.float32, d_layout)
    ds = gl.zeros([N, M], q_tiles.dtype, gl.DotOperandLayout(0, d_layout, 2))
    first, _free, _bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    count = 0
    mbarrier.wait(kv_full, 0)
    for _member in range(group):
        count, ds, dk = differentiate(
            first, end, count, ds, dk, v, q_tiles, do_tiles, p_tiles, numbers, q_full, q_empty, do_full, do_empty,
            numbers_full, p_full, p_empty, M, N, D, REST,
        )  # fmt: skip
    if count > 0:
        mbarrier.wait(q_full.index((count - 1) % 2), ((count - 1) // 2) & 1)
        dk = warpgroup_mma(ds, q_tiles.index((count - 1) % 2).reshape([M, D]), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
    v.store((dk * root).to(q_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [batch, key_head, start, 0], v_tiles)
    tma.store_wait(0)


@gluon.jit
def produce(
    q, k, v, do, exponents, deltas, k_tiles, v_tiles, q_tiles, do_tiles, numbers,
    kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
    start, batch, key_head, heads, group, queries, keys, band, padded,
    M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.expect(kv_full, 2 * k.block_type.nbytes)
    tma.async_copy_global_to_shared(k, [batch, key_head, start, 0], kv_full, k_tiles)
    tma.async_copy_global_to_shared(v, [batch, key_head, start, 0], kv_full, v_tiles)
    first, _free, _bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    count = 0
    for member in range(group):
        head = key_head * group + member
        plane = (batch * heads + head).to(gl.int64) * padded
        for index in range(first, end):
            stage = count % 2
            phase = ((count // 2) & 1) ^ 1
            rows = plane + index * M + gl.arange(0, M, layout)
            exponent = gl.load(exponents + rows)
            delta = gl.load(deltas + rows)
            mbarrier.wait(q_empty.index(stage), phase)
            mbarrier.expect(q_full.index(stage), q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [batch, head, index * M, 0], q_full.index(stage), q_tiles.index(stage))
            mbarrier.wait(do_empty.index(stage), phase)
            mbarrier.expect(do_full.index(stage), do.block_type.nbytes)
            tma.async_copy_global_to_shared(
                do, [batch, head, index * M, 0], do_full.index(stage), do_tiles.index(stage)
            )
            numbers.index(stage * 2).store(exponent)
            numbers.index(stage * 2 + 1).store(delta)
            mbarrier.arrive(numbers_full.index(stage), count=1)
            count += 1


@gluon.jit
def set_up(kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty):
    """Initialise the barriers: two consumers free each tile of queries; one fills, and one empties, each of weights."""
    mbarrier.init(kv_full, count=1)
    for each in gl.static_range(2):
        mbarrier.init(q_full.index(each), count=1)
        mbarrier.init(q_empty.index(each), count=2)
        mbarrier.init(do_full.index(each), count=1)
        mbarrier.init(do_empty.index(each), count=2)
        mbarrier.init(numbers_full.index(each), count=1)
        mbarrier.init(p_full.index(each), count=1)
        mbarrier.init(p_empty.index(each), count=1)


# One kernel for all lengths: compiling takes ten seconds.
@gluon.jit(do_not_specialize=["heads", "key_heads", "group", "queries", "keys", "padded", "lower", "upper"])
def wide_keys_kernel(
    q, k, v, do, exponents, deltas, dk_out, dv_out, heads, key_heads, group, queries, keys, padded, scale, root,
    lower, upper, bounds,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys. `root` is the scores' scale, `scale` log2(e) · root.

    For `lower`, `upper` and `bounds` see kernels.attention.hopper.backward.
    """
    band = lower, upper, bounds
    tiles = (keys + N - 1) // N
    program = gl.program_id(0)
    start = program % tiles * N
    key_head = program // tiles % key_heads
    batch = program // tiles // key_heads
    k_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, N, D], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], do.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], q.dtype)
    p_tiles = gl.allocate_shared_memory(q.dtype, [2, N, M], p_layout)
    numbers = gl.allocate_shared_memory(gl.float32, [4, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    numbers_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    set_up(kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty)
    fence_async_shared()
    start = after_the_kernel_before(start)
    gl.warp_specialize([
        (consume_values, (
            dv_out, k_tiles, q_tiles, do_tiles, p_tiles, numbers,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty,
            start, batch, key_head, group, queries, keys, band, scale, M, N, D, CAUSAL, REST,
        )),
        (consume_keys, (
            dk_out, v_tiles, q_tiles, do_tiles, p_tiles, numbers,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full, p_full, p_empty,
            start, batch, key_head, group, queries, keys, band, root, M, N, D, CAUSAL, REST,
        )),
        (produce, (
            q, k, v, do, exponents, deltas, k_tiles, v_tiles, q_tiles, do_tiles, numbers,
            kv_full, q_full, q_empty, do_full, do_empty, numbers_full,
            start, batch, key_head, heads, group, queries, keys, band, padded, M, N, CAUSAL,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def visit_keys(
    begin, end, count, ds, dq, q_tiles, do_tiles, exponent, delta, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    low, high, scale,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, WHO: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(count, dS, dQ / root) after the tiles of keys from `begin` to `end`, whose dS is not multiplied yet."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    for index in range(begin, end):
        k_stage = count % K_STAGES
        v_stage = count % V_STAGES
        zeros = gl.zeros([M, N], gl.float32, s_layout)
        who = WHO + known_late()
        q = q_tiles.index(who).reshape([M, D])
        do = do_tiles.index(who).reshape([M, D])
        before = gl.maximum(count - 1, 0)  # the first dS is zero
        mbarrier.wait(k_full.index(before % K_STAGES), (before // K_STAGES) & 1)
        dq_future = warpgroup_mma(ds, k_tiles.index(before % K_STAGES).reshape([N, D]), dq, is_async=True)
        mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
        k = k_tiles.index(k_stage).reshape([N, D])
        s = along_rows(q, k, zeros, REST)
        dq = warpgroup_mma_wait(1 if REST == 0 else 2, deps=[dq_future])
        mbarrier.arrive(k_empty.index(before % K_STAGES), count=1, pred=count > 0)
        mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)
        v = v_tiles.index(v_stage).reshape([N, D])
        dp = along_rows(do, v, zeros, REST)
        s = warpgroup_mma_wait(1 if REST == 0 else 2, deps=[s])
        p = gl.exp2(s * scale - exponent[:, None])
        if MASKED:
            p = gl.where(visible(low, high, index * N, p, CAUSAL), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(k_tiles.dtype), left_layout)
        count += 1
    return count, ds, dq


@gluon.jit
def consume_queries(
    dq_out, exponents, deltas, q_tiles, do_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
    start, batch, head, plane, queries, keys, band, padded, scale, root,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows = start + WHO * M + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    exponent = gl.load(exponents + plane * padded + rows)
    delta = gl.load(deltas + plane * padded + rows)
    begin, end = key_tiles(start, queries, keys, band, 2 * M, N, CAUSAL)
    free, bound = free_tiles(start + WHO * M, begin, end, queries, keys, band, M, N, CAUSAL)
    low = rows
    high = keys
    if CAUSAL is None:
        low, high = span(rows, queries, keys, band)
    dq = gl.zeros([M, D], gl.float32, d_layout)
    ds = gl.zeros([M, N], q_tiles.dtype, gl.DotOperandLayout(0, d_layout, 2))
    count = 0
    mbarrier.wait(q_full, 0)
    if CAUSAL is None:
        count, ds, dq = visit_keys(
            begin, free, count, ds, dq, q_tiles, do_tiles, exponent, delta, k_tiles, v_tiles,
            k_full, k_empty, v_full, v_empty, low, high, scale, M, N, D, K_STAGES, V_STAGES, CAUSAL, True, WHO, REST,
        )  # fmt: skip
    else:
        free = 0
    count, ds, dq = visit_keys(
        free, bound, count, ds, dq, q_tiles, do_tiles, exponent, delta, k_tiles, v_tiles,
        k_full, k_empty, v_full, v_empty, low, high, scale, M, N, D, K_STAGES, V_STAGES, CAUSAL, False, WHO, REST,
    )  # fmt: skip
    count, ds, dq = visit_keys(
        bound, end, count, ds, dq, q_tiles, do_tiles, exponent, delta, k_tiles, v_tiles,
        k_full, k_empty, v_full, v_empty, low, high, scale, M, N, D, K_STAGES, V_STAGES, CAUSAL, True, WHO, REST,
    )  # fmt: skip
    dq = warpgroup_mma(ds, k_tiles.index((count - 1) % K_STAGES).reshape([N, D]), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    room = q_tiles.index(WHO)
    room.reshape([M, D]).store((dq * root).to(q_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_out, [batch, head, start + WHO * M, 0], room)
    tma.store_wait(0)


@gluon.jit
def produce_keys(
    q, k, v, do, q_tiles, do_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
    start, batch, head, key_head, queries, keys, band,
    M: gl.constexpr, N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full, 4 * q.block_type.nbytes)
    for who in gl.static_range(2):
        tma.async_copy_global_to_shared(q, [batch, head, start + who * M, 0], q_full, q_tiles.index(who))
        tma.async_copy_global_to_shared(do, [batch, head, start + who * M, 0], q_full, do_tiles.index(who))
    begin, end = key_tiles(start, queries, keys, band, 2 * M, N, CAUSAL)
    for index in range(begin, end):
        count = index - begin
        k_stage = count % K_STAGES
        v_stage = count % V_STAGES
        mbarrier.wait(k_empty.index(k_stage), ((count // K_STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k, [batch, key_head, index * N, 0], k_full.index(k_stage), k_tiles.index(k_stage)
        )
        mbarrier.wait(v_empty.index(v_stage), ((count // V_STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v, [batch, key_head, index * N, 0], v_full.index(v_stage), v_tiles.index(v_stage)
        )


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys", "padded", "lower", "upper"])
def wide_queries_kernel(
    q, k, v, do, exponents, deltas, dq_out, heads, group, queries, keys, padded, scale, root, lower, upper, bounds,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, REGISTERS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """dQ of two tiles of queries. For `lower`, `upper` and `bounds` see kernels.attention.hopper.forward."""
    band = lower, upper, bounds
    tiles = (queries + 2 * M - 1) // (2 * M)
    program = gl.program_id(0)
    tile = program % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    start = tile * (2 * M)
    plane = (program // tiles).to(gl.int64)
    head = program // tiles % heads
    batch = program // tiles // heads
    key_head = head // group
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], do.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [K_STAGES, 1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [V_STAGES, 1, 1, N, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    start = after_the_kernel_before(start)
    gl.warp_specialize([
        (consume_queries, (
            dq_out, exponents, deltas, q_tiles, do_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
            start, batch, head, plane, queries, keys, band, padded, scale, root,
            0, M, N, D, K_STAGES, V_STAGES, CAUSAL, REST,
        )),
        (consume_queries, (
            dq_out, exponents, deltas, q_tiles, do_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
            start, batch, head, plane, queries, keys, band, padded, scale, root,
            1, M, N, D, K_STAGES, V_STAGES, CAUSAL, REST,
        )),
        (produce_keys, (
            q, k, v, do, q_tiles, do_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
            start, batch, head, key_head, queries, keys, band, M, N, K_STAGES, V_STAGES, CAUSAL,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
