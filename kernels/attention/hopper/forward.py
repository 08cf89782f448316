"""Forward pass of FlashAttention-3 in Gluon, for compute capability 9.0.

A program has consumers of four warps each, which take a part of the program's queries each, and a producer of one warp,
which fetches tiles by the copy engine. A consumer issues the scores of the next keys before it multiplies the present
weights with the values. So the values come with the next keys, in one slot. Consumers issue products in turns:
while the tensor cores multiply for one, another computes its exponentials.

Programs are few and walk over the tiles, the longest rows first.
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

from .barriers import along_rows, arrive_at, computed_here, packed, scaled, sums_by_thread, wait_at
from .visible import between, span, span_of_tile

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def place(index, tiles, planes, size, CAUSAL: gl.constexpr):
    """(tile, plane) of a unit of work: heads go in groups of `size`, and the longest rows of a group first."""
    group = index // (tiles * size)
    rest = index % (tiles * size)
    members = gl.minimum(size, planes - group * size)
    tile = rest // members
    if CAUSAL:
        tile = tiles - 1 - tile
    return tile, group * size + rest % members


@gluon.jit
def next_unit(turn, program, programs):
    """The unit of a program's turn: every other round goes backwards, so that nobody always gets the longer rows."""
    back = turn % 2
    return turn * programs + program * (1 - back) + (programs - 1 - program) * back


@gluon.jit
def key_tiles(start, queries, keys, band, ROWS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """(begin, end) of the tiles of keys that the queries from `start` on see: at least one, if need be unseen."""
    begin = 0
    if CAUSAL is None:
        begin, _free, _bound, end = span_of_tile(start, queries, keys, band, ROWS, N)
        end = gl.maximum(end, begin + 1)
    else:
        last = keys
        if CAUSAL:
            last = gl.minimum(start + ROWS, keys)
        end = (last + N - 1) // N
    return begin, end


@gluon.jit
def free_tiles(start, begin, end, queries, keys, band, ROWS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """(free, bound): of the tiles of keys behind the first, those that the queries from `start` on see all of.

    Plain masks have no tiles before `free`.
    """
    free = 1
    if CAUSAL is None:
        _begin, free, bound, _end = span_of_tile(gl.minimum(start, queries - 1), queries, keys, band, ROWS, N)
        free = gl.minimum(gl.maximum(free, begin + 1), end)
        bound = gl.minimum(gl.maximum(bound, free), end)
    elif CAUSAL:
        bound = gl.minimum(start, keys) // N
    else:
        bound = keys // N
    return free, bound


@gluon.jit
def visible(low, high, first, like, CAUSAL: gl.constexpr):
    """Return which keys from `first` on queries see; the mask broadcasts to the shape of `like`.

    `low` and `high` are the queries' `span` if CAUSAL is None, else the queries and the number of keys.
    """
    columns = first + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))[None, :]
    if CAUSAL is None:
        seen = between(first, low[:, None], high[:, None], like)
    elif CAUSAL:
        seen = columns <= gl.minimum(low, high - 1)[:, None]
    else:
        seen = columns < high
    return seen


@gluon.jit
def softmax_step(
    s, maximum, total, low, high, first, scale, masked, CAUSAL: gl.constexpr, LAZY: gl.constexpr, BARRIER: gl.constexpr
):  # fmt: skip
    """(weights, maximum, total, shrink) after one more tile of scores.

    If LAZY, `maximum` follows the scores only when they grow by a factor of 256: the output is seldom scaled down.
    For BARRIER, if it is not None, see `computed_here`.
    """
    if masked:
        s = gl.where(visible(low, high, first, s, CAUSAL), s, -float("inf"))
    raised = gl.maximum(maximum, gl.max(s, 1) * scale)
    if BARRIER is not None:
        computed_here(raised, BARRIER)
    if LAZY:
        raised = gl.where(raised > maximum + 8, raised, maximum)
    base = gl.where(raised == -float("inf"), 0.0, raised)  # as long as a row has seen scores of −∞ only
    p = gl.exp2(s * scale - base[:, None])
    shrink = gl.exp2(maximum - base)
    kept = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
    total = total * kept + gl.convert_layout(sums_by_thread(p), total.type.layout)
    return p, raised, total, shrink


@gluon.jit
def operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    """Weights as the left factor of a product."""
    return gl.convert_layout(packed(p, dtype), layout)


@gluon.jit
def multiply(weights, v, acc, tail):
    """`acc` plus weights times v, not waited for. If `acc` has half of v's columns, `tail` has those behind them."""
    if acc.shape[1] == v.shape[1]:
        acc = warpgroup_mma(weights, v, acc, is_async=True)
    else:
        HALF: gl.constexpr = acc.shape[1]
        acc = warpgroup_mma(weights, v.slice(0, HALF, 1), acc, is_async=True)
        others = gl.convert_layout(weights, gl.DotOperandLayout(0, tail.type.layout, 2))
        tail = warpgroup_mma(others, v.slice(HALF, tail.shape[1], 1), tail, is_async=True)
    return acc, tail


@gluon.jit
def await_products(acc, tail, NARROW: gl.constexpr):
    if NARROW:
        acc, tail = warpgroup_mma_wait(0, deps=[acc, tail])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, tail


@gluon.jit
def attend_to_first(
    first, count, q, k_tiles, full, empty, low, high, scale, s_layout: gl.constexpr, acc_layout: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(weights, maximum, total) of the first tile of keys, those from `first` on, in slot `count`, without values."""
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    stage = count % STAGES
    zeros = gl.zeros([M, N], gl.float32, s_layout)
    maximum = gl.full([M], -float("inf"), gl.float32, row_layout)
    total = sums_by_thread(zeros)
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    s = along_rows(q, k_tiles.index(stage).reshape([N, D]), zeros, REST)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(empty.index(stage), count=1)
    # The mask is compared in any case: a branch around it is slower.
    p, maximum, total, _shrink = softmax_step(s, maximum, total, low, high, first, scale, True, CAUSAL, D == 256, None)
    return operand(p, gl.DotOperandLayout(0, acc_layout, 2), k_tiles.dtype), maximum, total


@gluon.jit
def attend_to_tile(
    index, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles, full, empty, low, high, scale,
    masked, WHO: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, SEEN: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """The running softmax after the first SEEN keys of a tile, whose weights are not multiplied yet.

    At width 256 the output is scaled by the tile before's `shrink`, while tensor cores multiply the scores; the wait
    for the product with values then comes later, behind some exponentials. Elsewhere that is slower, or no faster.
    """
    D: gl.constexpr = k_tiles.shape[4]
    NARROW: gl.constexpr = acc.shape[1] < D
    MAXIMA_FIRST: gl.constexpr = D == 128 and REST == 0 and (CAUSAL is None or not CAUSAL)  # elsewhere slower
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    numbers_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    token = wait_at(token, 9 + WHO, 256)
    zeros = gl.zeros([acc.shape[0], SEEN], gl.float32, s_layout)
    s_future = along_rows(q, k_tiles.index(stage).reshape([N, D]).slice(0, SEEN, 0), zeros, REST)
    if D == 256:
        acc = scaled(acc, gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None])
    acc_future, tail_future = multiply(weights, v_tiles.index(stage).reshape([N, D]), acc, tail)
    token = arrive_at(token, 9 + (WHO + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(2 if NARROW else 1, deps=[s_future])
    p, raised, total, own_shrink = softmax_step(
        s, gl.convert_layout(maximum, numbers_layout), total, gl.convert_layout(low, numbers_layout), high, index * N,
        scale, masked, CAUSAL, D == 256, 12 + WHO if MAXIMA_FIRST else None,
    )  # fmt: skip
    acc, tail = await_products(acc_future, tail_future, NARROW)
    mbarrier.arrive(empty.index(stage), count=1)
    if D == 256:
        shrink = gl.convert_layout(own_shrink, maximum.type.layout)
    else:
        acc = acc * gl.convert_layout(own_shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    if NARROW:
        tail = tail * gl.convert_layout(own_shrink, gl.SliceLayout(1, tail.type.layout))[:, None]
    weights = operand(p, gl.DotOperandLayout(0, acc.type.layout, 2), k_tiles.dtype)
    maximum = gl.convert_layout(raised, maximum.type.layout)
    return token, weights, acc, tail, shrink, maximum, total


@gluon.jit
def attend(
    begin, end, free, bound, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles, full, empty,
    low, high, scale,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """The running softmax after the tiles of keys from `begin` to `end`; the last one's weights are not multiplied.

    If MASKED is None, those from `free` to `bound` get no mask.
    """
    for index in range(begin, end):
        masked = (index < free) | (index >= bound) if MASKED is None else MASKED
        token, weights, acc, tail, shrink, maximum, total = attend_to_tile(
            index, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles, full, empty, low,
            high, scale, masked, WHO, CONSUMERS, N, N, STAGES, CAUSAL, REST,
        )  # fmt: skip
        count += 1
    return count, token, weights, acc, tail, shrink, maximum, total


@gluon.jit
def attend_to_last(weights, acc, tail, shrink, count, v_tiles, full, empty, N: gl.constexpr, STAGES: gl.constexpr):
    """The output after the values of the last tile, in slot `count`: of as many keys as have weights."""
    D: gl.constexpr = v_tiles.shape[4]
    NARROW: gl.constexpr = acc.shape[1] < D
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    v = v_tiles.index(stage).reshape([N, D]).slice(0, weights.shape[1], 0)
    if D == 256:
        acc = scaled(acc, gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None])
    acc, tail = multiply(weights, v, acc, tail)
    acc, tail = await_products(acc, tail, NARROW)
    mbarrier.arrive(empty.index(stage), count=1)
    return acc, tail


@gluon.jit
def attend_to_unit(
    count, token, q, k_tiles, v_tiles, full, empty, low, high, start, begin, free, bound, end, keys, scale,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HALVES: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(count, token, output times total, its rest, maximum, total) of a consumer's queries after all tiles of keys.

    The queries see all of the tiles from `free` to `bound`, and some of the others from `begin` to `end`; for `low` and
    `high` see `visible`. `count` is the number of the next slot.
    At width 128, if REST is not 0, the output has half of the columns, and its rest REST more: the others are zero.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    NARROW: gl.constexpr = D == 128 and REST > 0
    WIDTH: gl.constexpr = D // 2 if NARROW else D
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros([M, WIDTH], gl.float32, acc_layout)
    if NARROW:
        tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
        tail = gl.zeros([M, REST], gl.float32, tail_layout)
    else:
        tail = 0
    weights, maximum, total = attend_to_first(
        begin * N, count, q, k_tiles, full, empty, low, high, scale, s_layout, acc_layout, STAGES, CAUSAL, REST
    )
    count += 1
    shrink = gl.full([M], 1.0, gl.float32, maximum.type.layout)
    halved = 0
    if CAUSAL is None:  # one loop with a branch is faster here than a loop for each of the three parts
        count, token, weights, acc, tail, shrink, maximum, total = attend(
            begin + 1, end, free, bound, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles,
            full, empty, low, high, scale, WHO, CONSUMERS, N, STAGES, CAUSAL, None, REST,
        )  # fmt: skip
    else:
        count, token, weights, acc, tail, shrink, maximum, total = attend(
            1, bound, free, bound, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles, full,
            empty, low, high, scale, WHO, CONSUMERS, N, STAGES, CAUSAL, False, REST,
        )  # fmt: skip
        if HALVES and WHO == 0:
            seen = gl.minimum(start + M, keys) - (end - 1) * N  # keys of the last tile, by the first consumer
            halved = ((end > 1) & (seen <= N // 2)).to(gl.int32)
        count, token, weights, acc, tail, shrink, maximum, total = attend(
            gl.maximum(bound, 1), end - halved, free, bound, count, token, weights, acc, tail, shrink, maximum, total,
            q, k_tiles, v_tiles, full, empty, low, high, scale, WHO, CONSUMERS, N, STAGES, CAUSAL, True, REST,
        )  # fmt: skip
    if HALVES and WHO == 0:
        if halved > 0:
            token, half_weights, acc, tail, shrink, maximum, total = attend_to_tile(
                end - 1, count, token, weights, acc, tail, shrink, maximum, total, q, k_tiles, v_tiles, full, empty,
                low, high, scale, True, WHO, CONSUMERS, N, N // 2, STAGES, CAUSAL, REST,
            )  # fmt: skip
            count += 1
            acc, tail = attend_to_last(half_weights, acc, tail, shrink, count, v_tiles, full, empty, N, STAGES)
        else:
            acc, tail = attend_to_last(weights, acc, tail, shrink, count, v_tiles, full, empty, N, STAGES)
    else:
        acc, tail = attend_to_last(weights, acc, tail, shrink, count, v_tiles, full, empty, N, STAGES)
    count += 1
    total = gl.convert_layout(gl.sum(total, 1), maximum.type.layout)
    return count, token, acc, tail, maximum, total


@gluon.jit
def store(
    out, logsumexp, out_tiles, q_empty, acc, tail, maximum, total, rows, held, plane, heads, start, queries,
    WHO: gl.constexpr, M: gl.constexpr, D: gl.constexpr, OWN_ROOM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Write a unit's output, through shared memory and the copy engine, and its log-sum-exp."""
    if CAUSAL is None:  # a query that sees no key has the output 0, and the log-sum-exp −∞
        total = gl.where(maximum == -float("inf"), 1.0, total)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None]
    room = out_tiles.index(WHO if OWN_ROOM else held)
    if OWN_ROOM:
        tma.store_wait(0)
    if acc.shape[1] == D:
        room.reshape([M, D]).store(acc.to(out.dtype))
    else:  # what lies behind both parts is outside the tensor, and is not copied
        tail = tail / gl.convert_layout(total, gl.SliceLayout(1, tail.type.layout))[:, None]
        room.reshape([M, D]).slice(0, acc.shape[1], 1).store(acc.to(out.dtype))
        room.reshape([M, D]).slice(acc.shape[1], tail.shape[1], 1).store(tail.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [plane // heads, plane % heads, start + WHO * M, 0], room)
    gl.store(logsumexp + plane.to(gl.int64) * queries + rows, (maximum + gl.log2(total)) * LN_2, mask=rows < queries)
    if not OWN_ROOM:
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(held), count=1)


@gluon.jit
def consume(
    out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
    tiles, heads, planes, size, queries, keys, band, scale,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, OWN_ROOM: gl.constexpr,
    HALVES: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    count = 0
    token = program
    if WHO == CONSUMERS - 1:
        token = arrive_at(program, 9, 256)
    rounds = (tiles * planes + programs - 1) // programs
    done = 0
    for turn in range(rounds):
        unit = next_unit(turn, program, programs)
        if unit < tiles * planes:
            tile, plane = place(unit, tiles, planes, size, CAUSAL)
            start = tile * (CONSUMERS * M)
            rows = start + WHO * M + gl.arange(0, M, row_layout)
            begin, end = key_tiles(start, queries, keys, band, CONSUMERS * M, N, CAUSAL)
            free, bound = free_tiles(start + WHO * M, begin, end, queries, keys, band, M, N, CAUSAL)
            low = rows
            high = keys
            if CAUSAL is None:
                low, high = span(rows, queries, keys, band)
            held = done % Q_STAGES * CONSUMERS + WHO
            mbarrier.wait(q_full.index(held), (done // Q_STAGES) & 1)
            q = q_tiles.index(held).reshape([M, D])
            if D == 128 and REST == 0 and (CAUSAL is None or CAUSAL):  # shared memory is read less; no mask: slower
                q = q.load(gl.DotOperandLayout(0, s_layout, 2))
            count, token, acc, tail, maximum, total = attend_to_unit(
                count, token, q, k_tiles, v_tiles, full, empty, low, high, start, begin, free, bound, end, keys,
                scale, WHO, CONSUMERS, M, N, D, STAGES, CAUSAL, HALVES, REST,
            )  # fmt: skip
            if OWN_ROOM:
                mbarrier.arrive(q_empty.index(held), count=1)
            store(
                out, logsumexp, out_tiles, q_empty, acc, tail, maximum, total, rows, held, plane, heads, start, queries,
                WHO, M, D, OWN_ROOM, CAUSAL,
            )  # fmt: skip
            done += 1
    tma.store_wait(0)
    if WHO == 0:
        wait_at(token, 9, 256)  # the last one's turn is over, too


@gluon.jit
def produce(
    q, k, v, q_tiles, k_tiles, v_tiles, q_full, q_empty, full, empty,
    tiles, heads, planes, size, queries, keys, band, group,
    CONSUMERS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles. A unit takes one slot more than tiles: the first has keys only, the last values only."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    count = 0
    done = 0
    rounds = (tiles * planes + programs - 1) // programs
    for turn in range(rounds):
        unit = next_unit(turn, program, programs)
        if unit < tiles * planes:
            tile, plane = place(unit, tiles, planes, size, CAUSAL)
            start = tile * (CONSUMERS * M)
            batch = plane // heads
            head = plane % heads
            key_head = head // group
            begin, end = key_tiles(start, queries, keys, band, CONSUMERS * M, N, CAUSAL)
            for who in gl.static_range(CONSUMERS):
                held = done % Q_STAGES * CONSUMERS + who
                mbarrier.wait(q_empty.index(held), ((done // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(held), q.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q, [batch, head, start + who * M, 0], q_full.index(held), q_tiles.index(held)
                )
            for index in range(begin, end + 1):
                stage = count % STAGES
                both = (index > begin) & (index < end)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), k.block_type.nbytes + v.block_type.nbytes, pred=both)
                mbarrier.expect(full.index(stage), k.block_type.nbytes, pred=both ^ True)
                tma.async_copy_global_to_shared(
                    v,
                    [batch, key_head, (index - 1) * N, 0],
                    full.index(stage),
                    v_tiles.index(stage),
                    pred=index > begin,
                )
                tma.async_copy_global_to_shared(
                    k, [batch, key_head, index * N, 0], full.index(stage), k_tiles.index(stage), pred=index < end
                )
                count += 1
            done += 1


@gluon.jit
def set_up(TILES_OF_QUERIES: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The barriers q_full, q_empty, full and empty. All consumers free a slot, one its own tile of queries."""
    q_full = gl.allocate_shared_memory(gl.int64, [TILES_OF_QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES_OF_QUERIES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for held in gl.static_range(TILES_OF_QUERIES):
        mbarrier.init(q_full.index(held), count=1)
        mbarrier.init(q_empty.index(held), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return q_full, q_empty, full, empty


# One kernel for all lengths: compiling takes ten seconds.
@gluon.jit(do_not_specialize=["heads", "planes", "size", "queries", "keys", "group", "lower", "upper"])
def forward_kernel(
    q, k, v, out, logsumexp, heads, planes, size, queries, keys, group, scale, lower, upper, bounds,
    CONSUMERS: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, OWN_ROOM: gl.constexpr, HALVES: gl.constexpr, REGISTERS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """out and its log-sum-exp (natural, contiguous). `scale` is log2(e) · the scores' scale, `planes` batches · heads.

    For `lower`, `upper` and `bounds` see kernels.attention.hopper.visible; they are None unless CAUSAL is.
    """
    band = lower, upper, bounds
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS, 1, 1, M, D], q.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, N, D], v.layout)
    out_tiles = q_tiles
    if OWN_ROOM:
        out_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, M, D], out.layout)
    q_full, q_empty, full, empty = set_up(Q_STAGES * CONSUMERS, STAGES, CONSUMERS)
    tiles = (queries + CONSUMERS * M - 1) // (CONSUMERS * M)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, scale, 0, CONSUMERS, M, N, D, STAGES, Q_STAGES, CAUSAL,
                OWN_ROOM, HALVES, REST,
            )),
            (consume, (
                out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, scale, 1, CONSUMERS, M, N, D, STAGES, Q_STAGES, CAUSAL,
                OWN_ROOM, HALVES, REST,
            )),
            (produce, (
                q, k, v, q_tiles, k_tiles, v_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, group, CONSUMERS, M, N, STAGES, Q_STAGES, CAUSAL,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, scale, 0, CONSUMERS, M, N, D, STAGES, Q_STAGES, CAUSAL,
                OWN_ROOM, HALVES, REST,
            )),
            (consume, (
                out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, scale, 1, CONSUMERS, M, N, D, STAGES, Q_STAGES, CAUSAL,
                OWN_ROOM, HALVES, REST,
            )),
            (consume, (
                out, logsumexp, q_tiles, k_tiles, v_tiles, out_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, scale, 2, CONSUMERS, M, N, D, STAGES, Q_STAGES, CAUSAL,
                OWN_ROOM, HALVES, REST,
            )),
            (produce, (
                q, k, v, q_tiles, k_tiles, v_tiles, q_full, q_empty, full, empty,
                tiles, heads, planes, size, queries, keys, band, group, CONSUMERS, M, N, STAGES, Q_STAGES, CAUSAL,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
