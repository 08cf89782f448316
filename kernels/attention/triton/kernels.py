"""The Triton kernels of FlashAttention-2: tiles in memory, then the forward pass, then the backward pass.

A tile is a block of consecutive rows (queries or keys) of one head. Its rows are `WIDTH` wide, the head dimension
rounded up to a power of two, since that is what Triton's tensors are: columns past the head dimension are zero in
registers and take no room in the inputs' and results' memory.

Forward: one program per tile of queries, online softmax over tiles of keys. Scores are kept in powers of two:
s·log2(e)/√d goes into exp2, one multiply-add before the one instruction that the hardware has. Tiles of keys that every
query of the program sees need no mask; those across the diagonal or the end of the keys come last, and tiles above the
diagonal are never visited.

A soft cap c makes tanh(s/(c√d)) of s, and c·log2(e) of the factor. `scale` is this factor, `inner` 1/(c√d) or None.
`lower`, `upper` and `bounds` are those of `visible`; plain masks have none of them, and then nothing of it is compiled.

Backward: weights P are computed again from the saved log-sum-exp.

    D  = rowsum(dO∘O) − dL     one number per query; dL is the gradient that arrives at the log-sum-exp, if any
    P  = exp(QKᵀ/√d − L)       dV = Pᵀ dO
    dP = dO Vᵀ                 dS = P∘(dP − D), with a soft cap times 1 − tanh²
    dQ = dS K/√d               dK = dSᵀ Q/√d

`keys_kernel` keeps a tile of keys and walks over the queries that see it. It can add each tile's share of dQ to a
float32 buffer as it goes (one pass, five products per pair of tiles), by the copy engine's bulk reduction or by atomic
additions; their order, and so the last bits of dQ, differ from run to run. `queries_kernel` keeps a tile of queries
instead and gives dQ alone: with it (two passes, seven products), every sum is done in one fixed order.

Tiles of scores stand upright in `keys_kernel` (keys × queries), so that Pᵀ and dSᵀ are left operands as they come out
of the products before, without a trip through shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...interpreted import patch_interpreter
from .operands import add_product, as_operand, held, product, split, transposed
from .visible import span, span_of_tile, visible

patch_interpreter()

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


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


@triton.jit
def load_operand(
    source, strides, batch, head, start, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of a tensor or, if PRECISION is "split", of each part, as `split_tensor` lays them out."""
    if PRECISION == "split":
        first = load_tile(source, strides, 3 * batch, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        second = load_tile(source, strides, 3 * batch + 1, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        third = load_tile(source, strides, 3 * batch + 2, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        return first, second, third
    else:  # noqa: RET505 - Triton compiles one of two branches, and nothing behind a return
        tile = load_tile(source, strides, batch, head, start, length, ROWS, HEAD_DIM, WIDTH, TMA)
        return (held(tile, HOLD),)


@triton.jit
def capped(scores, inner):
    """tanh(inner · scores), which is then scaled by the soft cap; the scores themselves without one.

    By a series where 1 − 2/(eˣ + 1) would lose digits.
    """
    if inner is not None:
        x = scores * inner
        squared = x * x
        series = x * (
            1 + squared * (-0.33333334 + squared * (0.13333334 + squared * (-0.05396825 + squared * 0.021869488)))
        )
        scores = tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1))
    return scores


@triton.jit
def uncapped(weights, scores, inner):
    """The weights times the slope of `capped`, which returned these scores: as factors of the scores' gradients."""
    if inner is not None:
        weights = weights * (1 - scores * scores)
    return weights


@triton.jit
def split_kernel(
    tensor, parts, strides, part_strides, heads, rows,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The parts of one tile of rows."""
    tile, head, batch = program(tl.cdiv(rows, ROWS), heads)
    start = tile * ROWS
    first, second, third = split(load_tile(tensor, strides, batch, head, start, rows, ROWS, HEAD_DIM, WIDTH, False))
    store_tile(parts, part_strides, 3 * batch, head, start, rows, first, ROWS, COLUMNS, WIDTH)
    store_tile(parts, part_strides, 3 * batch + 1, head, start, rows, second, ROWS, COLUMNS, WIDTH)
    store_tile(parts, part_strides, 3 * batch + 2, head, start, rows, third, ROWS, COLUMNS, WIDTH)


@triton.jit(do_not_specialize=["lower", "upper"])
def forward_kernel(
    q, k, v, out, logsumexp,
    q_strides, k_strides, v_strides, out_strides,
    heads, queries, keys, scale, inner, lower, upper, bounds,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """out and its log-sum-exp (natural, contiguous) for one tile of queries."""
    tiles = tl.cdiv(queries, QUERIES)
    tile, head, batch = program(tiles, heads)
    if CAUSAL or upper is not None:
        tile = tiles - 1 - tile  # the longest rows first: short ones fill the gaps at the end
    start = tile * QUERIES
    rows = start + tl.arange(0, QUERIES)
    q_tile = load_operand(q, q_strides, batch, head, start, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION, HOLD)
    accumulator = tl.zeros([QUERIES, WIDTH], tl.float32)
    maximum = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    low = None
    high = None
    free = 0
    if CAUSAL:
        end = tl.minimum(start + QUERIES, keys)
        bound = tl.minimum(start, keys) // KEYS * KEYS
    else:
        end = keys
        bound = keys // KEYS * KEYS
    if lower is not None or upper is not None or bounds is not None:
        low, high = span(rows[:, None], queries, keys, lower, upper, bounds)
        begin, free, bound, end = span_of_tile(start, queries, keys, lower, upper, bounds, QUERIES, KEYS)
        accumulator, maximum, total = attend(
            accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys, scale,
            inner, low, high, begin, free, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, True,
        )  # fmt: skip
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys, scale,
        inner, low, high, free, bound, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, False,
    )  # fmt: skip
    accumulator, maximum, total = attend(
        accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys, scale,
        inner, low, high, bound, end, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, True,
    )  # fmt: skip
    if low is not None:  # a query that sees no key has the output 0, and the log-sum-exp −∞
        total = tl.where(maximum == -float("inf"), 1.0, total)
    store_tile(out, out_strides, batch, head, start, queries, accumulator / total[:, None], QUERIES, HEAD_DIM, WIDTH)
    first = (batch * heads + head).to(tl.int64) * queries
    tl.store(logsumexp + first + rows, (maximum + tl.log2(total)) * LN_2, mask=rows < queries)


@triton.jit
def attend(
    accumulator, maximum, total, q_tile, k, v, k_strides, v_strides, batch, head, rows, keys, scale, inner,
    low, high, start, end,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys from `start` to `end`."""
    for first in tl.range(start, end, KEYS):
        k_tile = load_operand(k, k_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        scores = capped(product(q_tile, transposed(k_tile, PRECISION), PRECISION), inner)
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            seen = visible(
                (columns < keys)[None, :], rows[:, None], columns[None, :], columns[None, :], low, high, CAUSAL
            )
            scores = tl.where(seen, scores, -float("inf"))
        raised = tl.maximum(maximum, tl.max(scores, 1) * scale)
        base = tl.where(raised == -float("inf"), 0.0, raised)  # as long as a row has seen scores of −∞ only
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        v_tile = load_operand(v, v_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        weights = as_operand(weights, v_tile[0].dtype, PRECISION)
        accumulator = add_product(weights, v_tile, accumulator, PRECISION)
        maximum = raised
    return accumulator, maximum, total


# One kernel for all lengths.
@triton.jit(do_not_specialize=["heads", "queries"])
def rows_kernel(
    out, out_gradient, logsumexp, logsumexp_gradient, exponents, deltas, dq_sum, counter,
    out_strides, gradient_strides, heads, queries, padded,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_LOGSUMEXP_GRADIENT: tl.constexpr, CLEAR: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write, per query, its log-sum-exp in powers of two and D to `exponents` and `deltas` (batch, heads, padded).

    Rows past the last query get +∞ and 0: their weights come out as 0, so that the other kernels need no mask for them.
    If CLEAR, `dq_sum` (batch, heads, padded, SUM) becomes zero; and the number `counter`, if it is not None.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tiles = padded // ROWS
    tile, head, batch = program(tiles, heads)
    start = tile * ROWS
    rows = start + tl.arange(0, ROWS)
    o = load_tile(out, out_strides, batch, head, start, queries, ROWS, HEAD_DIM, WIDTH, False)
    do = load_tile(out_gradient, gradient_strides, batch, head, start, queries, ROWS, HEAD_DIM, WIDTH, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    plane = (batch * heads + head).to(tl.int64)
    inside = rows < queries
    if HAS_LOGSUMEXP_GRADIENT:
        delta -= tl.load(logsumexp_gradient + plane * queries + rows, mask=inside, other=0.0)
    exponent = tl.load(logsumexp + plane * queries + rows, mask=inside, other=float("inf")) * LOG2_E
    tl.store(exponents + plane * padded + rows, exponent)
    tl.store(deltas + plane * padded + rows, delta)
    if CLEAR:
        columns = tl.arange(0, WIDTH)[None, :]
        places = (plane * padded + rows)[:, None] * SUM + columns
        tl.store(dq_sum + places, tl.zeros([ROWS, WIDTH], tl.float32), mask=columns < SUM)
    if counter is not None:
        tl.store(counter, 0.0)


@triton.jit(do_not_specialize=["heads", "queries"])
def finish_kernel(
    dq_sum, dq, dq_strides, heads, queries, padded, root,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr, SUM: tl.constexpr,
    BY_THREAD: tl.constexpr,
):  # fmt: skip
    """Write `root` times one tile of dq_sum (batch, heads, padded, SUM) to dq. If BY_THREAD, each 64 rows of the sum
    have the order of kernels.attention.hopper.backward.by_thread, and ROWS is 64.
    """
    if OVERLAP:
        gdc_wait()
    tile, head, batch = program(tl.cdiv(queries, ROWS), heads)
    plane = (batch * heads + head).to(tl.int64) * padded
    if BY_THREAD:
        chunks = tl.arange(0, WIDTH // 8)[:, None]
        places = (plane + tile * ROWS) * SUM + chunks * 512 + tl.arange(0, 512)[None, :]
        values = tl.load(dq_sum + places, mask=chunks < SUM // 8, other=0.0)
        values = tl.permute(tl.reshape(values, [WIDTH // 8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
        values = tl.reshape(values, [ROWS, WIDTH])
    else:
        rows = tile * ROWS + tl.arange(0, ROWS)
        places = (plane + rows)[:, None] * SUM + tl.arange(0, WIDTH)[None, :]
        inside = (rows < queries)[:, None] & (tl.arange(0, WIDTH) < HEAD_DIM)[None, :]
        values = tl.load(dq_sum + places, mask=inside, other=0.0)
    values *= root
    store_tile(dq, dq_strides, batch, head, tile * ROWS, queries, values, ROWS, HEAD_DIM, WIDTH)


@triton.jit(do_not_specialize=["lower", "upper"])
def keys_kernel(
    q, k, v, do, exponents, deltas, dq_sum, dk, dv,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    heads, queries, keys, padded, scale, root, inner, lower, upper, bounds,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ONE_PASS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; if ONE_PASS, its share of dQ/root goes to `dq_sum` (batch, heads, padded, WIDTH).

    `root` is 1/√d, or the scale that takes its place.
    """
    tile, head, batch = program(tl.cdiv(keys, KEYS), heads // GROUP)
    start = tile * KEYS
    k_tile = load_operand(k, k_strides, batch, head, start, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
    v_tile = load_operand(v, v_strides, batch, head, start, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
    dk_tile = tl.zeros([KEYS, WIDTH], tl.float32)
    dv_tile = tl.zeros([KEYS, WIDTH], tl.float32)
    first = 0
    free = 0
    if CAUSAL:
        first = tl.minimum(start, queries) // QUERIES * QUERIES
        free = tl.minimum(tl.cdiv(start + KEYS, QUERIES) * QUERIES, queries)
    low = None
    high = None
    bound = queries
    end = queries
    if lower is not None or upper is not None or bounds is not None:
        # Turned round: of keys, the queries that see them.
        from_upper = None if upper is None else -upper
        to_lower = None if lower is None else -lower
        low, high = span((start + tl.arange(0, KEYS))[:, None], keys, queries, from_upper, to_lower, bounds)
        first, free, bound, end = span_of_tile(start, keys, queries, from_upper, to_lower, bounds, KEYS, QUERIES)
    if start + KEYS > keys:
        free = end
        bound = end
    for member in range(GROUP):
        query_head = head * GROUP + member
        plane = (batch * heads + query_head).to(tl.int64) * padded
        dk_tile, dv_tile = _visit_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, do, exponents, deltas, dq_sum, q_strides, do_strides,
            plane, batch, query_head, start, queries, keys, scale, inner, low, high, first, free,
            CAUSAL, HEAD_DIM, WIDTH, ONE_PASS, PRECISION, TMA, QUERIES, KEYS, True,
        )  # fmt: skip
        dk_tile, dv_tile = _visit_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, do, exponents, deltas, dq_sum, q_strides, do_strides,
            plane, batch, query_head, start, queries, keys, scale, inner, low, high, free, bound,
            CAUSAL, HEAD_DIM, WIDTH, ONE_PASS, PRECISION, TMA, QUERIES, KEYS, False,
        )  # fmt: skip
        if low is not None:
            dk_tile, dv_tile = _visit_queries(
                dk_tile, dv_tile, k_tile, v_tile, q, do, exponents, deltas, dq_sum, q_strides, do_strides,
                plane, batch, query_head, start, queries, keys, scale, inner, low, high, bound, end,
                CAUSAL, HEAD_DIM, WIDTH, ONE_PASS, PRECISION, TMA, QUERIES, KEYS, True,
            )  # fmt: skip
    store_tile(dk, dk_strides, batch, head, start, keys, dk_tile * root, KEYS, HEAD_DIM, WIDTH)
    store_tile(dv, dv_strides, batch, head, start, keys, dv_tile, KEYS, HEAD_DIM, WIDTH)


@triton.jit
def _visit_queries(
    dk_tile, dv_tile, k_tile, v_tile, q, do, exponents, deltas, dq_sum, q_strides, do_strides,
    plane, batch, head, start, queries, keys, scale, inner, low, high, begin, end,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ONE_PASS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dK and dV after the queries from `begin` to `end`."""
    for first in tl.range(begin, end, QUERIES):
        rows = first + tl.arange(0, QUERIES)
        q_tile = load_operand(q, q_strides, batch, head, first, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION)
        if not ONE_PASS:  # dP first is faster where registers allow it, slower where they spill
            do_tile = load_operand(
                do, do_strides, batch, head, first, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION
            )
            dp = product(v_tile, transposed(do_tile, PRECISION), PRECISION)
        exponent = tl.load(exponents + plane + rows)
        scores = capped(product(k_tile, transposed(q_tile, PRECISION), PRECISION), inner)
        weights = tl.exp2(scores * scale - exponent[None, :])
        if MASKED:
            columns = start + tl.arange(0, KEYS)
            seen = visible((columns < keys)[:, None], rows[None, :], columns[:, None], rows[None, :], low, high, CAUSAL)
            weights = tl.where(seen, weights, 0.0)
        sloped = uncapped(weights, scores, inner)
        if ONE_PASS:
            do_tile = load_operand(
                do, do_strides, batch, head, first, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION
            )
        dv_tile = add_product(as_operand(weights, do_tile[0].dtype, PRECISION), do_tile, dv_tile, PRECISION)
        if ONE_PASS:
            dp = product(v_tile, transposed(do_tile, PRECISION), PRECISION)
        delta = tl.load(deltas + plane + rows)
        ds = as_operand(sloped * (dp - delta[None, :]), q_tile[0].dtype, PRECISION)
        dk_tile = add_product(ds, q_tile, dk_tile, PRECISION)
        if ONE_PASS:
            share = product(transposed(ds, PRECISION), k_tile, PRECISION)
            if TMA:
                dq_sum.atomic_add([batch, head, first, 0], share.reshape(1, 1, QUERIES, WIDTH))
            else:
                places = (plane + rows)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
                tl.atomic_add(dq_sum + places, share, sem="relaxed")
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["lower", "upper"])
def queries_kernel(
    q, k, v, do, exponents, deltas, dq,
    q_strides, k_strides, v_strides, do_strides, dq_strides,
    heads, queries, keys, padded, scale, root, inner, lower, upper, bounds,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries."""
    tiles = tl.cdiv(queries, QUERIES)
    tile, head, batch = program(tiles, heads)
    if CAUSAL or upper is not None:
        tile = tiles - 1 - tile
    start = tile * QUERIES
    rows = start + tl.arange(0, QUERIES)
    q_tile = load_operand(q, q_strides, batch, head, start, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION, HOLD)
    do_tile = load_operand(do, do_strides, batch, head, start, queries, QUERIES, HEAD_DIM, WIDTH, TMA, PRECISION, HOLD)
    plane = (batch * heads + head).to(tl.int64) * padded
    exponent = tl.load(exponents + plane + rows)
    delta = tl.load(deltas + plane + rows)
    dq_tile = tl.zeros([QUERIES, WIDTH], tl.float32)
    low = None
    high = None
    free = 0
    if CAUSAL:
        end = tl.minimum(start + QUERIES, keys)
        bound = tl.minimum(start, keys) // KEYS * KEYS
    else:
        end = keys
        bound = keys // KEYS * KEYS
    if lower is not None or upper is not None or bounds is not None:
        low, high = span(rows[:, None], queries, keys, lower, upper, bounds)
        begin, free, bound, end = span_of_tile(start, queries, keys, lower, upper, bounds, QUERIES, KEYS)
        dq_tile = _visit_keys(
            dq_tile, q_tile, do_tile, exponent, delta, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys,
            scale, inner, low, high, begin, free, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, True,
        )  # fmt: skip
    dq_tile = _visit_keys(
        dq_tile, q_tile, do_tile, exponent, delta, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys,
        scale, inner, low, high, free, bound, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, False,
    )  # fmt: skip
    dq_tile = _visit_keys(
        dq_tile, q_tile, do_tile, exponent, delta, k, v, k_strides, v_strides, batch, head // GROUP, rows, keys,
        scale, inner, low, high, bound, end, CAUSAL, HEAD_DIM, WIDTH, PRECISION, TMA, KEYS, True,
    )  # fmt: skip
    store_tile(dq, dq_strides, batch, head, start, queries, dq_tile * root, QUERIES, HEAD_DIM, WIDTH)


@triton.jit
def _visit_keys(
    dq_tile, q_tile, do_tile, exponent, delta, k, v, k_strides, v_strides, batch, head, rows, keys,
    scale, inner, low, high, begin, end,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ after the keys from `begin` to `end`."""
    for first in tl.range(begin, end, KEYS):
        v_tile = load_operand(v, v_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        dp = product(do_tile, transposed(v_tile, PRECISION), PRECISION)
        k_tile = load_operand(k, k_strides, batch, head, first, keys, KEYS, HEAD_DIM, WIDTH, TMA, PRECISION)
        scores = capped(product(q_tile, transposed(k_tile, PRECISION), PRECISION), inner)
        weights = tl.exp2(scores * scale - exponent[:, None])
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            seen = visible(
                (columns < keys)[None, :], rows[:, None], columns[None, :], columns[None, :], low, high, CAUSAL
            )
            weights = tl.where(seen, weights, 0.0)
        sloped = uncapped(weights, scores, inner)
        ds = as_operand(sloped * (dp - delta[:, None]), k_tile[0].dtype, PRECISION)
        dq_tile = add_product(ds, k_tile, dq_tile, PRECISION)
    return dq_tile
