"""Who sees whom, in the Gluon kernels: the numbers of `kernels.attention.triton.visible`.

Kernels take CAUSAL as a constant: True or False for a plain mask, or None. Then `band` tells: (lower, upper, bounds).
Row i sees the columns from i + lower to i + upper. If `bounds` is not None, it has the start of each row's document,
then its stop; no row sees other documents. Rows are queries and columns keys, or, with the band turned round, rows are
keys and columns the queries that see them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def span(places, rows, columns, band):
    """Of some of the `rows`, one or a tensor: the first of the `columns` that they see, and the end of those."""
    lower, upper, bounds = band
    low = gl.maximum(places + lower, 0)
    high = gl.maximum(gl.minimum(places + upper + 1, columns), 0)
    if bounds is not None:
        inside = gl.minimum(places, rows - 1)
        low = gl.maximum(low, gl.load(bounds + inside))
        high = gl.minimum(high, gl.load(bounds + rows + inside))
    return low, high


@gluon.jit
def between(columns, low, high):
    """Whether columns lie in spans, by one comparison."""
    return (columns - low).to(gl.uint32) < gl.maximum(high - low, 0).to(gl.uint32)


@gluon.jit
def span_of_tile(start, rows, columns, band, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """(begin, free, bound, end) of the tiles of columns that a tile of rows sees; begin ≤ free ≤ bound ≤ end.

    From `begin` to `free`, and from `bound` to `end`, tiles need a mask; in between, all rows see all columns.
    """
    low, high = span(start, rows, columns, band)
    last_low, last_high = span(gl.minimum(start + ROWS, rows) - 1, rows, columns, band)
    begin = low // COLUMNS
    end = gl.maximum((last_high + COLUMNS - 1) // COLUMNS, begin)
    free = gl.minimum(gl.maximum((last_low + COLUMNS - 1) // COLUMNS, begin), end)
    bound = gl.minimum(gl.maximum(high // COLUMNS, free), end)
    return begin, free, bound, end
