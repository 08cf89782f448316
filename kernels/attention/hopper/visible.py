"""Who sees whom, in the Gluon kernels: the numbers of `kernels.attention.triton.visible`.

Kernels take CAUSAL as a constant: True or False for a plain mask, or None. Then `band` tells: (lower, upper, bounds).
Row i sees the columns from i + lower to i + upper. If `bounds` is not None, it has the start of each row's document,
then its stop; no row sees other documents. Rows are queries and columns keys, or, with the band turned round, rows are
keys and columns the queries that see them.
"""

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
def between(first, low, high, like):
    """Whether columns from `first` on lie in spans; in the shape of `like`, a product of up to 128 columns.

    A thread has two of each eight columns. A word of each row has a bit for each of the thread's columns, and a test of
    a bit takes an instruction less than a comparison.
    """
    columns = gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))[None, :]
    begin = bits_before(low - first - (columns & 6))
    word = gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r",
        [begin, gl.maximum(bits_before(high - first - (columns & 6)) - begin, 0)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return (word & (1 << ((columns >> 3) * 2 + (columns & 1)))) != 0


@gluon.jit
def bits_before(column):
    """How many of a thread's columns lie before one, counted from the thread's first."""
    return gl.maximum((column >> 3) * 2 + gl.minimum(column & 7, 2), 0)


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
