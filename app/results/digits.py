"""Formats numbers for people: four significant digits, and the same number of decimals throughout a column.

The `z` of formats writes what rounds to zero as 0, never as -0.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from app.results.sheet import Cell, Column
from flopwatch.text.numbers import NOTHING
from flopwatch.text.values import value_text

SMALL, TOO_SMALL = 1e-4, 1e-6
"""A smaller number, of which six decimals would not show three digits, is written with an exponent; and a smaller
spread, which they would show as 0."""
PURE_DECIMALS = 4
"""Smallest number of decimals of a number without a unit: sums of 10.0001 and 10.0021 must look different."""
MAX_DECIMALS = 6
WIDE = 1000.0
"""If the largest number of a column is more than this many times the smallest, each number gets its own decimals."""


def column_texts(values: Sequence[Any], column: Column) -> list[str]:
    """Write the cells of a column."""
    if column.role == "gain":
        return [_gain(value) for value in values]
    if column.role == "metric":
        decimals = _common(values, column.unit)
        return [cell_text(value, column.unit, decimals) for value in values]
    numbers = [Cell(value, None, None, "ok") for value in values if isinstance(value, float) and not column.mixed]
    decimals = _common(numbers, column.unit)
    return [_text(value, column, decimals) for value in values]


def _text(value: Any, column: Column, decimals: int | None) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float) and column.role == "value":
        return digits(value, column.unit) if decimals is None else f"{value:z.{decimals}f}"
    return value_text(value)


def _gain(cell: Any) -> str:
    """Write how many times better a row is: "1.18× (1.12–1.24)"."""
    if cell.outcome != "ok" or cell.value is None:
        return _without_value(cell)
    form = ".2f" if cell.value >= 0.1 else ".2g" if cell.value < SMALL else f".{_decimals(cell.value, 2)}f"
    ends = "" if cell.low is None else f" ({cell.low:{form}}–{cell.high:{form}})"
    return f"{cell.value:{form}}×{ends}"


def _without_value(cell: Cell) -> str:
    return NOTHING if cell.outcome in (None, "ok", "unknown") else cell.outcome


def _common(cells: Iterable[Any], unit: str | None) -> int | None:
    """Return the number of decimals that suits all numbers of a column; None if each needs its own. It shows three
    digits of the smallest number and four of the largest, one digit of the smallest standard deviation, and at most two
    digits of every standard deviation, except to show one of the smallest number. Beside such noise, numbers without a
    spread keep three digits of their own."""
    known = [cell for cell in cells if cell.value is not None]
    sizes = [abs(cell.value) for cell in known if cell.value]
    if not sizes or min(sizes) < SMALL or max(sizes) > WIDE * min(sizes):
        return None
    spreads = [cell.spread for cell in known if cell.spread and cell.n is not None and cell.n > 1]
    if any(spread < TOO_SMALL for spread in spreads):
        return None
    if not spreads and all(size.is_integer() if isinstance(size, float) else True for size in sizes):
        return 0
    wanted = max(_decimals(min(sizes), 3), _decimals(max(sizes), 4))
    if spreads:
        wanted = min(
            max(wanted, _decimals(min(spreads), 1)), wanted + 2, max(_decimals(spread, 2) for spread in spreads)
        )
        wanted = max(wanted, _decimals(min(sizes), 1))  # a number that was measured is never shown as 0
        exact = [abs(cell.value) for cell in known if cell.value and not cell.spread]
        if exact and wanted < _decimals(min(exact), 3):
            return None
    return min(MAX_DECIMALS, max(wanted, PURE_DECIMALS) if unit == "1" else wanted)


def cell_text(cell: Cell, unit: str | None = None, decimals: int | None = None) -> str:
    """Write a metric of a case: "21.346 ± 0.012", "oom", or NOTHING where it is not known.

    decimals: number of decimals of this number and its standard deviation; None: chosen for this number.
    """
    if cell.outcome != "ok" or cell.value is None:
        return _without_value(cell)
    value, spread = cell.value, cell.spread
    if spread is None or cell.n is None or cell.n < 2:
        return f"{_number(value, unit, decimals)}{_range_text(cell, unit, decimals)}"
    if decimals is not None:
        return f"{value:z.{decimals}f} ± {spread:.{decimals}f}"
    if spread == 0 and float(value).is_integer():
        return f"{value:z.0f} ± 0"
    if 0 < abs(value) < SMALL or 0 < spread < TOO_SMALL:
        return f"{value:.3g} ± {spread:.2g}"
    # The two leading digits of the standard deviation determine the significant digits of the mean.
    decimals = max(_decimals(spread, 2), _decimals(value, 1)) if spread > 0 else _decimals(value, 4)
    return f"{value:z.{decimals}f} ± {spread:.{decimals}f}"


def _number(value: float, unit: str | None, decimals: int | None) -> str:
    return digits(value, unit) if decimals is None else f"{value:z.{decimals}f}"


def _range_text(cell: Cell, unit: str | None, decimals: int | None) -> str:
    """Write the range of what a median summarises: " (15.5–635)"; nothing if its ends are equal or unknown."""
    if cell.least is None or cell.greatest is None or cell.least == cell.greatest:
        return ""
    return f" ({_number(cell.least, unit, decimals)}–{_number(cell.greatest, unit, decimals)})"


def digits(value: float, unit: str | None) -> str:
    """Write four digits of a number; a whole one, as counts are, without decimals."""
    if float(value).is_integer():
        return f"{value:z.0f}"
    if abs(value) < SMALL:
        return f"{value:.3g}"
    decimals = _decimals(value, 4)
    return f"{value:z.{max(decimals, PURE_DECIMALS) if unit == '1' else decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimals that shows `digits` significant digits of `value`, at most MAX_DECIMALS."""
    if value == 0:
        return 0
    return min(MAX_DECIMALS, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
