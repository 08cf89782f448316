"""Who sees whom, in the kernels: the numbers of `kernels.attention.masks`, in registers.

Query i sees consecutive keys: those of its document from i + lower to i + upper, which are a `Band`'s diagonals. Key j
is seen by consecutive queries: those of its document from j - upper to j - lower. So one function tells both, and both
grow with the row. Each of lower, upper and the documents' bounds may be None, and then takes no instruction.

Plain masks, none and the causal one aligned top-left, are `CAUSAL` alone: no bounds are given.
"""

import triton
import triton.language as tl

from ...interpreted import patch_interpreter

patch_interpreter()


@triton.jit
def visible(seen, rows, columns, bounded, low, high, CAUSAL: tl.constexpr):
    """The mask: whether queries `rows` see keys `columns`, of those that are `seen` otherwise.

    `low` and `high` are the queries' `span`, and bound the keys; or the keys' span, and bound the queries; or None.
    """
    if CAUSAL:
        seen = seen & (columns <= rows)
    if low is not None:
        seen = seen & (bounded >= low)
        seen = seen & (bounded < high)
    return seen


@triton.jit
def span(places, rows, columns, lower, upper, bounds):
    """Of some of the `rows`, one or a tensor: the first of the `columns` that they see, and the end of these columns.

    Args:
        lower, upper: Of the band: column minus row.
        bounds: Where each row's document starts, then where it stops; or None.
    """
    low = places * 0
    high = low + columns
    if lower is not None:
        low = tl.maximum(low, places + lower)
    if upper is not None:
        high = tl.maximum(tl.minimum(high, places + upper + 1), 0)
    if bounds is not None:
        inside = places < rows
        low = tl.maximum(low, tl.load(bounds + places, mask=inside, other=0))
        high = tl.minimum(high, tl.load(bounds + rows + places, mask=inside, other=0))
    return low, high


@triton.jit
def span_of_tile(start, rows, columns, lower, upper, bounds, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile of rows, which tiles of columns it sees: (begin, free, bound, end).

    From `begin` to `free`, and from `bound` to `end`, tiles need a mask; in between, all rows see all columns.
    """
    low, high = span(start, rows, columns, lower, upper, bounds)
    last_low, end = span(tl.minimum(start + ROWS, rows) - 1, rows, columns, lower, upper, bounds)
    free = tl.minimum(tl.cdiv(last_low, COLUMNS) * COLUMNS, end)
    bound = tl.maximum(high // COLUMNS * COLUMNS, free)
    return low // COLUMNS * COLUMNS, free, bound, end


@triton.jit
def bounds_kernel(ends, bounds, documents, tokens, TOKENS: tl.constexpr, ENDS: tl.constexpr):
    """Where the document of each token starts and stops, (2, tokens), from the documents' ends."""
    places = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.zeros([TOKENS], tl.int32)
    stop = start + tokens
    for first in tl.range(0, documents, ENDS):
        numbers = first + tl.arange(0, ENDS)
        some = tl.load(ends + numbers, mask=numbers < documents, other=0)[None, :]
        is_before = some <= places[:, None]
        start = tl.maximum(start, tl.max(tl.where(is_before, some, 0), 1))
        stop = tl.minimum(stop, tl.min(tl.where(is_before, tokens, some), 1))
    tl.store(bounds + places, start, mask=places < tokens)
    tl.store(bounds + tokens + places, stop, mask=places < tokens)
