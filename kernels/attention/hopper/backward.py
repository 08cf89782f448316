"""Backward pass of FlashAttention-3 in Gluon, for compute capability 9.0 and head dimensions up to 128.

A unit of work is a tile of keys and values, and a walk over the queries that see them. Programs are few, and each takes
the next unit of all as soon as it has fetched what one needs, so that the next tiles come while this unit ends. Two
consumers of four warps take half of the keys each. Scores stand upright (keys × queries), so that weights P and their
gradients dS feed the products for dV and dK from registers. dS also goes to shared memory, where both consumers read
the whole of it: each multiplies a half of dQ, one tile of queries later, so that neither waits for the other's dS. One
warp fetches tiles, another adds dQ to a float32 sum in memory, both by the copy engine; if DIRECT, consumers add dQ
from registers.

Three functions walk over the queries: `visit`, `visit_halves` (STREAM), and `consume_narrow_unit` (NARROW). If STREAM,
a unit's last dQ is multiplied with the first tile of the next unit.

See kernels.attention.triton.kernels for the formulas, and for `exponents` and `deltas`.
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

from .barriers import (
    add_through_copy_engine,
    after_the_kernel_before,
    along_rows,
    arrive_at,
    known_late,
    wait_at,
)
from .forward import place
from .visible import between, span, span_of_tile


@gluon.jit
def query_tiles(start, queries, keys, band, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """(first, free, bound, end): tiles of queries that see the keys from `start` on; those from `free` to `bound` need
    no mask. Plain masks have no tiles behind `bound`.
    """
    if CAUSAL is None:
        first, free, bound, end = span_of_tile(start, keys, queries, band, N, M)
        if start + N > keys:
            free = end
            bound = end
    else:
        end = (queries + M - 1) // M
        first = 0
        free = 0
        if CAUSAL:
            first = gl.minimum(start // M, end)
            free = gl.minimum((start + N + M - 1) // M, end)
        if start + N > keys:
            free = end
        bound = end
    return first, free, bound, end


@gluon.jit
def next_tile(index, head, first, end):
    """(index, head) of the tile of queries that follows: the next one of the head, or the next head's first."""
    index += 1
    if index == end:
        index = first
        head += 1
    return index, head


@gluon.jit
def needs_mask(index, free, bound, CAUSAL: gl.constexpr):
    """Whether a tile of queries does; see `query_tiles`."""
    return (index < free) | (index >= bound) if CAUSAL is None else index < free


@gluon.jit
def own_spans(start, queries, keys, band, CAUSAL: gl.constexpr, layout: gl.constexpr, KEYS: gl.constexpr):
    """What `hide` needs of the KEYS keys from `start` on: the `span` of each, read before the loop; with a plain mask,
    the first key and the number of all."""
    low = start
    high = keys
    if CAUSAL is None:
        rows = start + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        low, high = span(rows, keys, queries, band)
        high = gl.where(rows < keys, high, 0)
    return low, high


@gluon.jit
def hide(p, low, high, first_query, CAUSAL: gl.constexpr):
    """Weights (keys × queries), 0 where a query does not see a key; for `low` and `high` see `own_spans`."""
    if CAUSAL is None:
        visible = between(first_query, low[:, None], high[:, None], p)
    else:
        rows = low + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))
        columns = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
        visible = (rows < high)[:, None]
        if CAUSAL:
            visible = visible & (rows[:, None] <= columns[None, :])
    return gl.where(visible, p, 0.0)


@gluon.jit
def own_keys(k_tiles, v_tiles, held, WHO: gl.constexpr):
    """(tile `held` of keys, a consumer's half of it, its half of the values), addressed anew in each turn."""
    N: gl.constexpr = k_tiles.shape[3]
    D: gl.constexpr = k_tiles.shape[4]
    place = known_late() + held
    k_tile = k_tiles.index(place).reshape([N, D])
    k = k_tile.slice(WHO * (N // 2), N // 2, 0)
    v = v_tiles.index(place).reshape([N, D]).slice(WHO * (N // 2), N // 2, 0)
    return k_tile, k, v


@gluon.jit
def await_queries(q_tiles, q_full, count, total):
    """Tile `count` of `total` tiles of queries. Behind the last one nothing is awaited, and the tile is an old one."""
    stage = count & 1
    mbarrier.wait(q_full.index(stage), (count >> 1) & 1, pred=count < total)
    return q_tiles.index(stage).reshape([q_tiles.shape[3], q_tiles.shape[4]])


@gluon.jit
def first_scores(
    k_tiles, q_tiles, q_full, held, count, total, WHO: gl.constexpr, QUERIES: gl.constexpr, REST: gl.constexpr
):
    """Scores of a consumer's keys and the first QUERIES queries; of whatever is there, and unused, if `total` is 0."""
    HALF: gl.constexpr = k_tiles.shape[3] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    stage = count & 1
    mbarrier.wait(q_full.index(stage), (count >> 1) & 1, pred=total > 0)
    k = k_tiles.index(held).reshape([2 * HALF, k_tiles.shape[4]]).slice(WHO * HALF, HALF, 0)
    q = q_tiles.index(stage).reshape([q_tiles.shape[3], q_tiles.shape[4]]).slice(0, QUERIES, 0)
    s = along_rows(k, q, gl.zeros([HALF, QUERIES], gl.float32, layout), REST)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def part_of_dq(ds, k, FROM: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of dQ from FROM on, not waited for.

    `ds` (keys × queries) and `k` (keys × D) are in shared memory.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROWS: gl.constexpr = ds.shape[1]
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(FROM, WIDTH, 1), zeros, use_acc=False, is_async=True)


@gluon.jit
def in_registers(tiles, held, FROM: gl.constexpr, WIDTH: gl.constexpr, WHO: gl.constexpr, layout: gl.constexpr):
    """Columns of a consumer's keys or values, as the left factor of a product of this layout, which then reads half as
    much of shared memory: that is busier than the tensor cores."""
    N: gl.constexpr = tiles.shape[3]
    own = tiles.index(held).reshape([N, tiles.shape[4]]).slice(WHO * (N // 2), N // 2, 0)
    return own.slice(FROM, WIDTH, 1).load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def tell_other(token, count, WHO: gl.constexpr):
    """Tell the other consumer that this one's dS of tile `count` is stored, and dQ of the tile before multiplied."""
    return arrive_at(token, 5 + 2 * (1 - WHO) + (count & 1), 256)


@gluon.jit
def hear_other(token, count, WHO: gl.constexpr):
    """Wait until the other consumer has signalled tile `count`."""
    return wait_at(token, 5 + 2 * WHO + (count & 1), 256)


@gluon.jit
def begin_unit(token, count, WHO: gl.constexpr):
    """Tell the other consumer that dS may be stored: dK and dV of the unit before are copied from there. The dQ that
    follows, of the tile before the first, is not added up."""
    tma.store_wait(0)
    return tell_other(token, count + 1, WHO)


@gluon.jit
def free_queries(token, stage):
    """Tell the producer that this consumer has read tile `stage` of queries."""
    return arrive_at(token, 11 + stage, 288)


@gluon.jit
def await_free_queries(token, stage):
    return wait_at(token, 11 + stage, 288)


@gluon.jit
def free_gradients(token, stage):
    """Tell the producer that this consumer has read tile `stage` of the output's gradient."""
    return arrive_at(token, 13 + stage, 288)


@gluon.jit
def await_free_gradients(token, stage):
    return wait_at(token, 13 + stage, 288)


@gluon.jit
def by_thread(dq):
    """dQ of 64 rows in the order of registers: four numbers of each thread, then the next four. So threads store 16
    bytes side by side, and nothing is exchanged between them. `finish_kernel` reads this order.
    """
    WIDTH: gl.constexpr = dq.shape[1]
    parts = dq.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return parts.reshape([WIDTH // 4, 256])


@gluon.jit
def hand_on_dq(dq, dq_sum, dq_empty, count, place, token, WHO: gl.constexpr, DIRECT: gl.constexpr):
    """Store a consumer's part of dQ in `dq_sum`, for the warp that adds it up, once that has read the part before. If
    DIRECT, `dq_sum` is the sum: add the part there, as one of tile `place`, if that is not negative.
    """
    x = by_thread(dq)
    if DIRECT:
        if place >= 0:
            rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
            columns = gl.arange(0, 256, gl.SliceLayout(0, x.type.layout))
            start = dq_sum + (place.to(gl.int64) * 2 + WHO) * (x.shape[0] * 256)
            gl.atomic_add(start + (rows[:, None] * 256 + columns[None, :]), x, sem="relaxed", scope="gpu")
    else:
        mbarrier.wait(dq_empty.index(WHO), (count & 1) ^ 1)
        dq_sum.index(WHO if dq_sum.shape[0] == 2 else 0).reshape([x.shape[0], 256]).store(x)
        fence_async_shared()
        token = arrive_at(token, 9 + WHO, 160)
    return token


@gluon.jit
def hand_on_last_dq(
    k_tiles, v_tiles, ds_tiles, dq_sum, dq_empty, kv_empty, held, turn, begin, count, place, token,
    WHO: gl.constexpr, TAIL: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Multiply and hand on dQ of the unit's last tile, and wait until the other consumer has read all tiles."""
    token = hear_other(token, count + 1, WHO)
    k_tile, _k, _v = own_keys(k_tiles, v_tiles, held, WHO)
    LEFT: gl.constexpr = k_tiles.shape[4] // 2
    dq = part_of_dq(ds_tiles.index((count + 1) & 1), k_tile, WHO * LEFT, TAIL if WHO == 1 else LEFT)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(kv_empty.index(held), count=1)
    token = hand_on_dq(dq, dq_sum, dq_empty, count + turn, place, token, WHO, DIRECT)
    token = hear_other(tell_other(token, count, WHO), count, WHO)
    if count == begin:  # a unit that fetches nothing has not waited, and will write dK and dV
        token = after_the_kernel_before(token)
    return token


@gluon.jit
def visit(
    begin, end, free, bound, held, turn, base, place, count, token, dk, dv, k_tiles, v_tiles, q_tiles, do_tiles,
    ds_tiles, dq_sum, numbers, q_full, do_full, dq_empty, low, high, scale,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    REST: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """dK and dV after the tiles of queries from `begin` to `end`. For `free` and `bound` see `needs_mask`; with a plain
    mask, MASKED tells. Tile 0 of the head is tile `base` of all, and dQ of `place` is not multiplied yet.
    """
    HALF: gl.constexpr = N // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    for index in range(begin, end):
        stage = count & 1
        phase = (count >> 1) & 1
        q = q_tiles.index(stage).reshape([M, D])
        do = do_tiles.index(stage).reshape([M, D])
        k_tile, k, v = own_keys(k_tiles, v_tiles, held, WHO)
        zeros = gl.zeros([HALF, M], gl.float32, s_layout)
        mbarrier.wait(q_full.index(stage), phase)
        s = along_rows(k, q, zeros, REST)
        mbarrier.wait(do_full.index(stage), phase)
        dp = along_rows(v, do, zeros, REST)
        exponent = numbers.index(stage * 2).load(column_layout)
        s = warpgroup_mma_wait(1 if REST == 0 else 2, deps=[s])
        p = gl.exp2(s * scale - exponent[None, :])
        if CAUSAL is None:
            if needs_mask(index, free, bound, CAUSAL):
                p = hide(p, low, high, index * M, CAUSAL)
        elif MASKED:
            p = hide(p, low, high, index * M, CAUSAL)
        weights = gl.convert_layout(p.to(q_tiles.dtype), left_layout)
        delta = numbers.index(stage * 2 + 1).load(column_layout)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta[None, :])).to(q_tiles.dtype)
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        token = hear_other(token, count + 1, WHO)
        ds_tiles.index(stage).slice(WHO * HALF, HALF, 0).store(ds)
        fence_async_shared()
        dq = part_of_dq(ds_tiles.index(1 - stage), k_tile, WHO * (D // 2), D // 2)
        dk = warpgroup_mma(gl.convert_layout(ds, left_layout), q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        token = tell_other(token, count, WHO)
        token = free_gradients(token, stage)
        token = hand_on_dq(dq, dq_sum, dq_empty, count + turn, place, token, WHO, DIRECT)
        place = base + index
        dk = warpgroup_mma_wait(0, deps=[dk])
        token = free_queries(token, stage)
        count += 1
    return count, place, token, dk, dv


@gluon.jit
def leave_out(
    begin, end, held, turn, base, place, count, token, k_tiles, v_tiles, ds_tiles, dq_sum, q_full, do_full, dq_empty,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """As `visit`, for tiles of queries that see none of this consumer's half of the keys: its dS is zero."""
    HALF: gl.constexpr = N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    for index in range(begin, end):
        stage = count & 1
        phase = (count >> 1) & 1
        k_tile, _k, _v = own_keys(k_tiles, v_tiles, held, WHO)
        mbarrier.wait(q_full.index(stage), phase)
        mbarrier.wait(do_full.index(stage), phase)
        token = free_queries(free_gradients(token, stage), stage)
        token = hear_other(token, count + 1, WHO)
        ds_tiles.index(stage).slice(WHO * HALF, HALF, 0).store(gl.zeros([HALF, M], ds_tiles.dtype, layout))
        fence_async_shared()
        dq = part_of_dq(ds_tiles.index(1 - stage), k_tile, WHO * (D // 2), D // 2)
        dq = warpgroup_mma_wait(0, deps=[dq])
        token = tell_other(token, count, WHO)
        token = hand_on_dq(dq, dq_sum, dq_empty, count + turn, place, token, WHO, DIRECT)
        place = base + index
        count += 1
    return count, place, token


@gluon.jit
def visit_half(
    s, dp, dv, do, exponents, deltas, ds_tiles, count, token, index, free, bound, low, high, scale,
    FROM: gl.constexpr, WHO: gl.constexpr, CAUSAL: gl.constexpr, left_layout: gl.constexpr,
):  # fmt: skip
    """(token, dV, dS) after the half from query FROM on of tile `index`. One product is issued between dP and this dV.

    dV is issued before dP is awaited: otherwise ptxas moves 43 of 64 exponentials behind that wait.
    """
    HALF: gl.constexpr = s.shape[0]
    PART: gl.constexpr = s.shape[1]
    column_layout: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    p = gl.exp2(s * scale - exponents.slice(FROM, PART, 0).load(column_layout)[None, :])
    if needs_mask(index * 2 + FROM // PART if CAUSAL is None else index, free, bound, CAUSAL):
        p = hide(p, low, high, index * (2 * PART) + FROM, CAUSAL)
    weights = gl.convert_layout(p.to(do.dtype), left_layout)
    dv = warpgroup_mma(weights, do.slice(FROM, PART, 0), dv, is_async=True)
    dp = warpgroup_mma_wait(2, deps=[dp])
    ds = (p * (dp - deltas.slice(FROM, PART, 0).load(column_layout)[None, :])).to(do.dtype)
    if FROM == 0:
        token = hear_other(token, count + 1, WHO)
    ds_tiles.index(count & 1).slice(WHO * HALF, HALF, 0).store(ds)
    return token, dv, ds


@gluon.jit
def visit_halves(
    first, free, bound, end, group, held, before, begin, token, dk, dv, k_tiles, v_tiles, q_tiles, do_tiles, ds_first,
    ds_second, dq_tiles, numbers, q_full, do_full, dq_empty, low, high, scale,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """(slot of the last tile's keys, token, dK, dV) after the tiles of queries from `first` to `end` of a whole group.
    For `free` and `bound` see `needs_mask`; they count halves of tiles if CAUSAL is None. The tile before has its keys
    in slot `before`. It takes each tile in two halves, and multiplies the scores of a half during the half before:
    tensor cores have work while the weights are computed. Registers suffice for one loop, and if dV is awaited before
    dQ is issued."""
    HALF: gl.constexpr = N // 2
    PART: gl.constexpr = M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    total = group * (end - first)
    s = first_scores(k_tiles, q_tiles, q_full, held, begin, total, WHO, PART, 0)
    v = in_registers(v_tiles, held, 0, D, WHO, s_layout)
    k = in_registers(k_tiles, held, 0, D, WHO, s_layout)
    tma.store_wait(0)
    token = wait_at(token, 15, 256)  # both have heard the last tile at the barrier that is used next
    token = tell_other(token, begin + 1, WHO)
    index = first
    for count in range(begin, begin + total):
        stage = count & 1
        q = q_tiles.index(stage).reshape([M, D])
        do = do_tiles.index(stage).reshape([M, D])
        k_tile, _k, _v = own_keys(k_tiles, v_tiles, before, WHO)
        exponents, deltas = numbers.index(stage * 2), numbers.index(stage * 2 + 1)
        zeros = gl.zeros([HALF, PART], gl.float32, s_layout)
        mbarrier.wait(do_full.index(stage), (count >> 1) & 1)
        dp = along_rows(v, do.slice(0, PART, 0), zeros, 0)
        s_next = along_rows(k, q.slice(PART, PART, 0), zeros, 0)
        token, dv, ds = visit_half(
            s, dp, dv, do, exponents, deltas, ds_first, count, token, index, free, bound, low, high, scale, 0,
            WHO, CAUSAL, left_layout,
        )  # fmt: skip
        dp = along_rows(v, do.slice(PART, PART, 0), zeros, 0)
        dk = warpgroup_mma(gl.convert_layout(ds, left_layout), q.slice(0, PART, 0), dk, is_async=True)
        s_next = warpgroup_mma_wait(3, deps=[s_next])
        token, dv, ds = visit_half(
            s_next, dp, dv, do, exponents, deltas, ds_second, count, token, index, free, bound, low, high, scale,
            PART, WHO, CAUSAL, left_layout,
        )  # fmt: skip
        q_next = await_queries(q_tiles, q_full, count + 1, begin + total)
        s = along_rows(k, q_next.slice(0, PART, 0), zeros, 0)
        dv = warpgroup_mma_wait(1, deps=[dv])
        token = free_gradients(token, stage)
        fence_async_shared()
        dq = part_of_dq((ds_first if WHO == 0 else ds_second).index(1 - stage), k_tile, 0, D)
        dk = warpgroup_mma(gl.convert_layout(ds, left_layout), q.slice(PART, PART, 0), dk, is_async=True)
        s, dq = warpgroup_mma_wait(1, deps=[s, dq])
        token = tell_other(token, count, WHO)
        token = hand_on_dq(dq, dq_tiles, dq_empty, count, 0, token, WHO, False)
        before = held
        dk = warpgroup_mma_wait(0, deps=[dk])
        token = free_queries(token, stage)
        index += 1
        if index == end:
            index = first
    return before, token, dk, dv


@gluon.jit
def own_tile(unit, tiles, planes, key_heads, size, CAUSAL: gl.constexpr):
    """(tile, batch, head of keys) of a unit: head by head, which shares the L2 cache, or, with a causal mask, by groups
    of heads those tiles first that most queries see."""
    tile = unit % tiles
    plane = unit // tiles
    if CAUSAL:
        tile, plane = place(unit, tiles, planes, size, False)
    return tile, plane // key_heads, plane % key_heads


@gluon.jit
def tell_unit(units, held, unit):
    """Write a unit in slot `held` of `units`; `kv_full` tells the others."""
    units.index(held).store(gl.full([1], unit, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def hear_unit(units, kv_full, turn, WARPS: gl.constexpr):
    """(unit, its slot of `units`) of a program's turn, when its keys and values are there."""
    held = turn & (units.shape[0] - 1)
    mbarrier.wait(kv_full.index(held), (turn // units.shape[0]) & 1)
    return gl.max(units.index(held).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0), held


@gluon.jit
def consume(
    dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dk_rooms, dq_sum, numbers,
    units, kv_full, kv_empty, q_full, do_full, dq_empty,
    tiles, planes, size, heads, key_heads, group, queries, keys, band, padded, scale, root,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
    STREAM: gl.constexpr, NARROW: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Take unit after unit. dV is copied out from dS's memory; dK from `dk_rooms`, which has dS of second halves if
    STREAM."""
    HALF: gl.constexpr = N // 2
    dv_rooms = ds_tiles._reinterpret(dv_out.dtype, [ds_tiles.shape[2] * 4 // D, 1, 1, HALF, D], dv_out.layout)
    if STREAM:
        ds_second = dk_rooms
        dk_rooms = ds_second._reinterpret(dv_out.dtype, [4, 1, 1, HALF, D], dv_out.layout)
    turn = 0
    count = 0
    filled = 0  # if STREAM, units that have tiles of queries: only theirs are keys and values fetched
    before = 0  # if STREAM, the slot of the last tile's keys
    token = tiles
    unit, held = hear_unit(units, kv_full, turn, 4)
    while unit < tiles * planes:
        tile, batch, key_head = own_tile(unit, tiles, planes, key_heads, size, CAUSAL)
        start = tile * N
        if STREAM:
            mbarrier.arrive(kv_empty.index(held), count=1)  # behind Gluon's barrier: all threads have read `unit`
            begin = count
            count, before, token, dk, dv = consume_stream_unit(
                k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, ds_second, dq_sum, numbers, q_full, do_full, dq_empty,
                start, filled & 1, before, count, token, group, queries, keys, band, scale, WHO, M, N, D, CAUSAL,
            )  # fmt: skip
            filled += (count > begin).to(gl.int32)
            dk_room = dk_rooms.index(2 * (count & 1) + WHO)
            dv_room = dv_rooms.index(2 * (count & 1) + WHO)
            dk_room.reshape([HALF, D]).store((dk * root).to(q_tiles.dtype))
            dv_room.reshape([HALF, D]).store(dv.to(q_tiles.dtype))
        else:
            dk_room = dk_rooms.index(WHO)
            dv_room = dv_rooms.index(WHO)
            if NARROW:
                count, token = consume_narrow_unit(
                    dk_room, dv_room, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_sum, numbers, q_full, do_full,
                    dq_empty, kv_empty, start, held, turn, count, token, group, queries, keys, band, scale, root,
                    WHO, M, N, D, CAUSAL, REST,
                )  # fmt: skip
            else:
                base = (batch * heads + key_head * group) * (padded // M)
                count, token = consume_unit(
                    dk_room, dv_room, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_sum, numbers, q_full, do_full,
                    dq_empty, kv_empty, start, held, turn, base, count, token, group, queries, keys, band, padded,
                    scale, root, WHO, M, N, D, CAUSAL, REST, DIRECT,
                )  # fmt: skip
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_out, [batch, key_head, start + WHO * HALF, 0], dk_room)
        tma.async_copy_shared_to_global(dv_out, [batch, key_head, start + WHO * HALF, 0], dv_room)
        turn += 1
        unit, held = hear_unit(units, kv_full, turn, 4)
    if STREAM:
        last_dq(k_tiles, v_tiles, ds_tiles if WHO == 0 else ds_second, dq_sum, dq_empty, before, count, token, WHO)
    tma.store_wait(0)


@gluon.jit
def last_dq(k_tiles, v_tiles, ds_tiles, dq_tiles, dq_empty, before, count, token, WHO: gl.constexpr):
    """Multiply and hand on dQ of a program's last tile, if it had any, of the keys in slot `before`."""
    if count > 0:
        k_tile, _k, _v = own_keys(k_tiles, v_tiles, before, WHO)
        dq = part_of_dq(ds_tiles.index((count + 1) & 1), k_tile, 0, k_tiles.shape[4])
        hand_on_dq(warpgroup_mma_wait(0, deps=[dq]), dq_tiles, dq_empty, count, 0, token, WHO, False)


@gluon.jit
def consume_stream_unit(
    k_tiles, v_tiles, q_tiles, do_tiles, ds_first, ds_second, dq_tiles, numbers, q_full, do_full, dq_empty,
    start, held, before, count, token, group, queries, keys, band, scale,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """(count, slot of the last tile's keys, token, dK / root, dV) of a unit. `count` tiles of queries went before; dQ
    of the last one, in slot `before`, is not multiplied yet, nor is this unit's last one at the end."""
    HALF: gl.constexpr = N // 2
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M // 2, 16])
    dk = gl.zeros([HALF, D], gl.float32, d_layout)
    dv = gl.zeros([HALF, D], gl.float32, d_layout)
    first, free, bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    low, high = own_spans(start + WHO * HALF, queries, keys, band, CAUSAL, s_layout, HALF)
    if CAUSAL is None:
        _first, free, bound, _end = query_tiles(start + WHO * HALF, queries, keys, band, M // 2, HALF, CAUSAL)
    before, token, dk, dv = visit_halves(
        first, free, bound, end, group, held, before, count, token, dk, dv, k_tiles, v_tiles, q_tiles, do_tiles,
        ds_first, ds_second, dq_tiles, numbers, q_full, do_full, dq_empty, low, high, scale, WHO, M, N, D, CAUSAL,
    )  # fmt: skip
    if first == end:  # a unit that fetches nothing has not waited for the kernel before, and will write dK and dV
        token = after_the_kernel_before(token)
    count += group * (end - first)
    token = hear_other(token, count + 1, WHO)  # dK and dV go where dS of the tile before the last one was
    return count, before, token, dk, dv


@gluon.jit
def consume_unit(
    dk_room, dv_room, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_sum, numbers, q_full, do_full,
    dq_empty, kv_empty, start, held, turn, base, count, token, group, queries, keys, band, padded, scale, root,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """(count, token) after a unit, whose dK and dV are stored in their rooms. `count` tiles of queries went before, and
    tile 0 of the first head is tile `base` of all."""
    HALF: gl.constexpr = N // 2
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    dk = gl.zeros([HALF, D], gl.float32, d_layout)
    dv = gl.zeros([HALF, D], gl.float32, d_layout)
    first, free, bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    low, high = own_spans(start + WHO * HALF, queries, keys, band, CAUSAL, s_layout, HALF)
    begin = count
    token = begin_unit(token, count, WHO)
    own_first = first
    own_end = end
    if CAUSAL is None or CAUSAL:
        # The later the keys, the later are the queries that see them: the second consumer leaves out the first ones,
        # and the first consumer the last ones.
        own_first, free, bound, own_end = query_tiles(start + WHO * HALF, queries, keys, band, M, HALF, CAUSAL)
        own_first = first if WHO == 0 else gl.minimum(own_first, end)
        own_end = own_end if WHO == 0 else end
    place = -1
    # Loops for tiles with and without a mask; one loop for all takes less code where tiles with a mask come twice.
    for _member in range(group):
        if WHO == 1 and (CAUSAL is None or CAUSAL):
            count, place, token = leave_out(
                first, own_first, held, turn, base, place, count, token, k_tiles, v_tiles, ds_tiles, dq_sum, q_full,
                do_full, dq_empty, WHO, M, N, D, DIRECT,
            )  # fmt: skip
        masked_end = own_end if CAUSAL is None else free
        count, place, token, dk, dv = visit(
            own_first, masked_end, free, bound, held, turn, base, place, count, token, dk, dv, k_tiles, v_tiles,
            q_tiles, do_tiles, ds_tiles, dq_sum, numbers, q_full, do_full, dq_empty, low, high, scale, WHO, M, N, D,
            CAUSAL, True, REST, DIRECT,
        )  # fmt: skip
        if CAUSAL is not None:
            count, place, token, dk, dv = visit(
                gl.maximum(own_first, free), end, free, bound, held, turn, base, place, count, token, dk, dv, k_tiles,
                v_tiles, q_tiles, do_tiles, ds_tiles, dq_sum, numbers, q_full, do_full, dq_empty, low, high, scale, WHO,
                M, N, D, CAUSAL, False, REST, DIRECT,
            )  # fmt: skip
        elif WHO == 0:
            count, place, token = leave_out(
                own_end, end, held, turn, base, place, count, token, k_tiles, v_tiles, ds_tiles, dq_sum, q_full,
                do_full, dq_empty, WHO, M, N, D, DIRECT,
            )  # fmt: skip
        base += padded // M
    token = hand_on_last_dq(
        k_tiles, v_tiles, ds_tiles, dq_sum, dq_empty, kv_empty, held, turn, begin, count, place, token,
        WHO, D // 2, DIRECT,
    )  # fmt: skip
    dk_room.reshape([HALF, D]).store((dk * root).to(q_tiles.dtype))
    dv_room.reshape([HALF, D]).store(dv.to(q_tiles.dtype))
    return count, token


@gluon.jit
def consume_narrow_unit(
    dk_room, dv_room, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tile, numbers, q_full, do_full,
    dq_empty, kv_empty, start, held, turn, begin, token, group, queries, keys, band, scale, root,
    WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """As `consume_unit`, without the columns of zeros: dK and dV are sums of D/2 columns and of REST more.

    The first consumer multiplies dQ's D/2 columns, the second the REST others. A tile's scores are multiplied during
    the tile before; for the order of products and the one loop, see `visit_halves`.
    """
    HALF: gl.constexpr = N // 2
    LEFT: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    left_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEFT, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    left_operand: gl.constexpr = gl.DotOperandLayout(0, left_layout, 2)
    rest_operand: gl.constexpr = gl.DotOperandLayout(0, rest_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dk = gl.zeros([HALF, LEFT], gl.float32, left_layout)
    dv = gl.zeros([HALF, LEFT], gl.float32, left_layout)
    dk_rest = gl.zeros([HALF, REST], gl.float32, rest_layout)
    dv_rest = gl.zeros([HALF, REST], gl.float32, rest_layout)
    first, free, bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
    free = gl.maximum(first, free)
    low, high = own_spans(start + WHO * HALF, queries, keys, band, CAUSAL, s_layout, HALF)
    total = group * (end - first)
    v = in_registers(v_tiles, held, 0, LEFT, WHO, s_layout)
    v_rest = in_registers(v_tiles, held, LEFT, REST, WHO, s_layout)
    s = first_scores(k_tiles, q_tiles, q_full, held, begin, total, WHO, M, REST)
    token = begin_unit(token, begin, WHO)
    index = first
    for count in range(begin, begin + total):
        stage = count & 1
        phase = (count >> 1) & 1
        q = q_tiles.index(stage).reshape([M, D])
        do = do_tiles.index(stage).reshape([M, D])
        k_tile, k, _v = own_keys(k_tiles, v_tiles, held, WHO)
        zeros = gl.zeros([HALF, M], gl.float32, s_layout)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v, do.slice(0, LEFT, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_rest, do.slice(LEFT, REST, 1).permute((1, 0)), dp, is_async=True)
        token = hear_other(token, count + 1, WHO)
        dq = part_of_dq(ds_tiles.index(1 - stage), k_tile, WHO * LEFT, REST if WHO == 1 else LEFT)
        exponent = numbers.index(stage * 2).load(column_layout)
        p = gl.exp2(s * scale - exponent[None, :])
        if needs_mask(index, free, bound, CAUSAL):
            p = hide(p, low, high, index * M, CAUSAL)
        weights = p.to(q_tiles.dtype)
        delta = numbers.index(stage * 2 + 1).load(column_layout)
        dv = warpgroup_mma(gl.convert_layout(weights, left_operand), do.slice(0, LEFT, 1), dv, is_async=True)
        dv_rest = warpgroup_mma(
            gl.convert_layout(weights, rest_operand), do.slice(LEFT, REST, 1), dv_rest, is_async=True
        )
        dp = warpgroup_mma_wait(3, deps=[dp])
        ds = (p * (dp - delta[None, :])).to(q_tiles.dtype)
        ds_tiles.index(stage).slice(WHO * HALF, HALF, 0).store(ds)
        s = along_rows(k, await_queries(q_tiles, q_full, count + 1, begin + total), zeros, REST)
        fence_async_shared()
        dq = warpgroup_mma_wait(4, deps=[dq])
        token = tell_other(token, count, WHO)
        token = hand_on_dq(dq, dq_tile, dq_empty, count + turn, 0, token, WHO, False)
        dk = warpgroup_mma(gl.convert_layout(ds, left_operand), q.slice(0, LEFT, 1), dk, is_async=True)
        dk_rest = warpgroup_mma(gl.convert_layout(ds, rest_operand), q.slice(LEFT, REST, 1), dk_rest, is_async=True)
        s, dv, dv_rest = warpgroup_mma_wait(2, deps=[s, dv, dv_rest])
        token = free_gradients(token, stage)
        dk, dk_rest = warpgroup_mma_wait(0, deps=[dk, dk_rest])
        token = free_queries(token, stage)
        index += 1
        if index == end:
            index = first
    count = begin + total
    token = hand_on_last_dq(
        k_tiles, v_tiles, ds_tiles, dq_tile, dq_empty, kv_empty, held, turn, begin, count, 0, token, WHO, REST, False
    )
    dk_room.reshape([HALF, D]).slice(0, LEFT, 1).store((dk * root).to(q_tiles.dtype))
    dk_room.reshape([HALF, D]).slice(LEFT, REST, 1).store((dk_rest * root).to(q_tiles.dtype))
    dv_room.reshape([HALF, D]).slice(0, LEFT, 1).store(dv.to(q_tiles.dtype))
    dv_room.reshape([HALF, D]).slice(LEFT, REST, 1).store(dv_rest.to(q_tiles.dtype))
    return count, token


@gluon.jit
def await_free_tiles(token, awaited, until):
    """Wait until both consumers have read the tiles of queries, and of the output's gradient, before number `until`."""
    while awaited < until:
        token = await_free_gradients(token, awaited & 1)
        token = await_free_queries(token, awaited & 1)
        awaited += 1
    return token, awaited


@gluon.jit
def fetch(rows, numbers, place, place_of_numbers, full, tile, tile_of_numbers):
    """Fetch a tile of rows, and a number of each."""
    mbarrier.expect(full, rows.block_type.nbytes + numbers.block_type.nbytes)
    tma.async_copy_global_to_shared(rows, place, full, tile)
    tma.async_copy_global_to_shared(numbers, place_of_numbers, full, tile_of_numbers)


@gluon.jit
def produce(
    q, k, v, do, numbers, k_tiles, v_tiles, q_tiles, do_tiles, number_tiles, units, counter, kv_full, kv_empty, q_full,
    do_full, tiles, planes, size, heads, key_heads, group, queries, keys, band, padded,
    M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, LATE: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Fetch a unit's keys and values, then tiles of queries with their exponents, and of gradients with their deltas.
    `counter` tells how many units were taken beside each program's first."""
    HELD: gl.constexpr = units.shape[0]
    turn = 0
    count = 0
    awaited = 0
    filled = 0  # as in `consume`
    begin = 0  # the first tile of the last unit that has tiles of queries
    token = tiles
    unit = gl.program_id(0)
    while unit < tiles * planes:
        tile, batch, key_head = own_tile(unit, tiles, planes, key_heads, size, CAUSAL)
        start = tile * N
        first, _free, _bound, end = query_tiles(start, queries, keys, band, M, N, CAUSAL)
        held = turn & (HELD - 1)
        mbarrier.wait(kv_empty.index(held), ((turn // HELD) & 1) ^ 1)
        tell_unit(units, held, unit)
        full = kv_full.index(held)
        slot = held
        if STREAM:
            slot = filled & 1
            if filled > 1:  # this slot's keys are read until the first tile of the unit in the other slot
                token, awaited = await_free_tiles(token, awaited, begin + 1)
            if first < end:
                filled += 1
                begin = count
        fetched = first < end if STREAM else True
        mbarrier.expect(full, 2 * k.block_type.nbytes, pred=fetched)
        tma.async_copy_global_to_shared(k, [batch, key_head, start, 0], full, k_tiles.index(slot), pred=fetched)
        tma.async_copy_global_to_shared(v, [batch, key_head, start, 0], full, v_tiles.index(slot), pred=fetched)
        if STREAM and first == end:
            mbarrier.arrive(full, count=1)
        head = key_head * group
        index = first
        if LATE and turn == 0:  # the kernel before writes the numbers, and clears the counter
            token = after_the_kernel_before(token)
        for _each in range(group * (end - first)):
            stage = count & 1
            row = (batch * heads + head) * padded + index * M
            token, awaited = await_free_tiles(token, awaited, count - 1)
            place = [batch, head, index * M, 0]
            fetch(q, numbers, place, [0, row], q_full.index(stage), q_tiles.index(stage), number_tiles.index(2 * stage))
            fetch(
                do, numbers, place, [1, row], do_full.index(stage), do_tiles.index(stage),
                number_tiles.index(2 * stage + 1),
            )  # fmt: skip
            index, head = next_tile(index, head, first, end)
            count += 1
        turn += 1
        unit = gl.num_programs(0) + gl.atomic_add(counter, 1)
    held = turn & (HELD - 1)
    mbarrier.wait(kv_empty.index(held), ((turn // HELD) & 1) ^ 1)
    tell_unit(units, held, unit)
    mbarrier.arrive(kv_full.index(held), count=1)
    token, awaited = await_free_tiles(token, awaited, count)  # a program leaves no barrier half full


@gluon.jit
def add_parts(dq_sum, dq_rest, dq_tiles, rest_tiles, dq_empty, batch, head, index, token, NARROW: gl.constexpr):
    """Add the consumers' parts of dQ of a tile to the sum; those of a negative index are of no tile.

    If NARROW, the parts are of unequal width; the second consumer's, which has fewer products, is waited for first.
    """
    LINES: gl.constexpr = dq_sum.block_shape[2]
    if NARROW:
        line = index * (LINES + dq_rest.block_shape[2])
        token = wait_at(token, 10, 160)
        if index >= 0:
            add_through_copy_engine(dq_rest, [batch, head, line + LINES, 0], rest_tiles.index(0))
        token = wait_at(token, 9, 160)
        if index >= 0:
            add_through_copy_engine(dq_sum, [batch, head, line, 0], dq_tiles.index(0))
    else:
        for who in gl.static_range(2):
            token = wait_at(token, 9 + who, 160)
            if index >= 0:
                add_through_copy_engine(dq_sum, [batch, head, (index * 2 + who) * LINES, 0], dq_tiles.index(who))
    tma.store_wait(0)
    mbarrier.arrive(dq_empty.index(0), count=1)
    mbarrier.arrive(dq_empty.index(1), count=1)
    return token


@gluon.jit
def add_up(
    dq_sum, dq_rest, dq_tiles, rest_tiles, units, kv_full, kv_empty, dq_empty,
    tiles, planes, size, key_heads, group, queries, keys, band,
    M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, LATE: gl.constexpr, STREAM: gl.constexpr,
    NARROW: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Add dQ of tile after tile to its sum; consumers hand it on one tile late."""
    if not DIRECT:
        token = after_the_kernel_before(tiles) if LATE else tiles  # which clears the sum
        turn = 0
        at = -1  # the tile whose parts come next: none yet
        at_batch = 0
        at_head = 0
        unit, held = hear_unit(units, kv_full, turn, 1)
        while unit < tiles * planes:
            mbarrier.arrive(kv_empty.index(held), count=1)
            tile, batch, key_head = own_tile(unit, tiles, planes, key_heads, size, CAUSAL)
            first, _free, _bound, end = query_tiles(tile * N, queries, keys, band, M, N, CAUSAL)
            index = first
            head = key_head * group
            for _each in range(group * (end - first)):
                token = add_parts(dq_sum, dq_rest, dq_tiles, rest_tiles, dq_empty, at_batch, at_head, at, token, NARROW)
                at = index
                at_batch = batch
                at_head = head
                index, head = next_tile(index, head, first, end)
            if not STREAM:
                token = add_parts(dq_sum, dq_rest, dq_tiles, rest_tiles, dq_empty, at_batch, at_head, at, token, NARROW)
                at = -1
            turn += 1
            unit, held = hear_unit(units, kv_full, turn, 1)
        if at >= 0:
            add_parts(dq_sum, dq_rest, dq_tiles, rest_tiles, dq_empty, at_batch, at_head, at, token, NARROW)


@gluon.jit
def allocate_dq(dq_sum, dq_rest, NARROW: gl.constexpr, DIRECT: gl.constexpr):
    """Shared memory for both consumers' parts of dQ: one array of two, or two arrays of unequal width. If DIRECT, the
    sum itself."""
    if DIRECT:
        dq_tiles = dq_sum
        rest_tiles = dq_tiles
    else:
        dq_tiles = gl.allocate_shared_memory(
            gl.float32, [1 if NARROW else 2, 1, 1, dq_sum.block_shape[2], dq_sum.block_shape[3]], dq_sum.layout
        )
        rest_tiles = dq_tiles
    if NARROW:
        rest_tiles = gl.allocate_shared_memory(
            gl.float32, [1, 1, 1, dq_rest.block_shape[2], dq_rest.block_shape[3]], dq_rest.layout
        )
    return dq_tiles, rest_tiles


@gluon.jit
def set_up(HELD: gl.constexpr, DIRECT: gl.constexpr):
    """The barriers kv_full, kv_empty, q_full, do_full and dq_empty. All that are set up are waited for: Triton gives
    the memory of one that is not to others, and such kernels hung now and then when several processes shared a GPU."""
    kv_full = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for held in gl.static_range(HELD):
        mbarrier.init(kv_full.index(held), count=1)
        mbarrier.init(kv_empty.index(held), count=2 if DIRECT else 3)
    for each in gl.static_range(2):
        mbarrier.init(q_full.index(each), count=1)
        mbarrier.init(do_full.index(each), count=1)
        if not DIRECT:
            mbarrier.init(dq_empty.index(each), count=1)
    fence_async_shared()
    return kv_full, kv_empty, q_full, do_full, dq_empty


# One kernel for all lengths: compiling takes ten seconds.
@gluon.jit(
    do_not_specialize=["heads", "key_heads", "group", "queries", "keys", "planes", "padded", "size", "lower", "upper"]
)
def backward_kernel(
    q, k, v, do, numbers, dq_sum, dq_rest, counter, dk_out, dv_out,
    heads, key_heads, group, queries, keys, planes, padded, size, scale, root, lower, upper, bounds,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
    REST: gl.constexpr, STREAM: gl.constexpr, NARROW: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """dK and dV of tiles of keys, whose share of dQ / root goes to `dq_sum`: (batch, heads, padded, D) numbers, each
    64 rows in the order of `by_thread`, seen as lines of 256; if DIRECT, its address.

    If NARROW, that sum has D/2 + REST columns: first D/2 of a tile, then REST in blocks of `dq_rest`, the same memory.

    `numbers` (2, batch · heads · padded) is exponents and deltas. `root` is the scores' scale, `scale` log2(e) · root.
    `counter` is a zero of 32 bits. `lower`, `upper` and `bounds` tell, of keys, the queries that see them (see
    kernels.attention.hopper.visible); they are None unless CAUSAL is.
    """
    band = lower, upper, bounds
    LATE: gl.constexpr = CAUSAL is None or CAUSAL  # wait for the kernel before behind the first fetches; else slower
    HELD: gl.constexpr = 2 if STREAM else 1  # slots for units, and for their keys and values
    tiles = (keys + N - 1) // N
    k_tiles = gl.allocate_shared_memory(q.dtype, [HELD, 1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [HELD, 1, 1, N, D], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, M, D], do.layout)
    WIDE: gl.constexpr = M // 2 if STREAM else M
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, WIDE], q.dtype)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, N, WIDE], ds_layout)
    if STREAM:  # dS of second halves: Gluon lets a consumer's threads wait for each other between accesses to one array
        dk_rooms = gl.allocate_shared_memory(q.dtype, [2, N, WIDE], ds_layout)
    else:
        dk_rooms = gl.allocate_shared_memory(q.dtype, [2, 1, 1, N // 2, D], dk_out.layout)
    dq_tiles, rest_tiles = allocate_dq(dq_sum, dq_rest, NARROW, DIRECT)
    number_tiles = gl.allocate_shared_memory(gl.float32, [4, 1, M], numbers.layout)
    read_numbers = number_tiles._reinterpret(gl.float32, [4, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    units = gl.allocate_shared_memory(gl.int32, [HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full, kv_empty, q_full, do_full, dq_empty = set_up(HELD, DIRECT)
    if not LATE:
        tiles = after_the_kernel_before(tiles)
    gl.warp_specialize([
        (consume, (
            dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dk_rooms, dq_tiles, read_numbers,
            units, kv_full, kv_empty, q_full, do_full, dq_empty,
            tiles, planes, size, heads, key_heads, group, queries, keys, band, padded, scale, root,
            0, M, N, D, CAUSAL, REST, STREAM, NARROW, DIRECT,
        )),
        (consume, (
            dk_out, dv_out, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dk_rooms, rest_tiles, read_numbers,
            units, kv_full, kv_empty, q_full, do_full, dq_empty,
            tiles, planes, size, heads, key_heads, group, queries, keys, band, padded, scale, root,
            1, M, N, D, CAUSAL, REST, STREAM, NARROW, DIRECT,
        )),
        (produce, (
            q, k, v, do, numbers, k_tiles, v_tiles, q_tiles, do_tiles, number_tiles, units,
            counter.to(gl.pointer_type(gl.int32), bitcast=True), kv_full, kv_empty, q_full, do_full,
            tiles, planes, size, heads, key_heads, group, queries, keys, band, padded, M, N, CAUSAL, LATE, STREAM,
        )),
        (add_up, (
            dq_sum, dq_rest, dq_tiles, rest_tiles, units, kv_full, kv_empty, dq_empty,
            tiles, planes, size, key_heads, group, queries, keys, band, M, N, CAUSAL, LATE, STREAM, NARROW, DIRECT,
        )),
    ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
