"""Writes a sheet as text: JSON and CSV with every number, Markdown, LaTeX and HTML for people. It alone uses pandas."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from app.errors import InvalidRequest
from app.layout import FORMATS, Format
from app.store.results.sheet import Cell, Column, Sheet

if TYPE_CHECKING:
    import pandas as pd

EMPTY = "No results.\n"
LONG = 40
"""A page breaks texts of more characters into lines, in a column wide enough to read them."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def render(sheet: Sheet, format: Format, *, base_url: str | None = None) -> str:  # noqa: A002  (the parameter's name)
    """Write a table of results as text.

    JSON ({"columns", "rows", "next"}, with "missing" for measurements) and CSV have every column; a metric has its
    value, `_std` beside a mean, `_n` and `_outcome`. Markdown, LaTeX and HTML have mean ± standard deviation, or the
    outcome in words, and the sheet's notes below; they leave `validity` out where all is valid, and `unit_index` where
    there is one unit.
    """
    if format not in _RENDERERS:
        raise InvalidRequest(f"There is no format {format!r}; there is {', '.join(FORMATS)}.")
    return _RENDERERS[format](sheet)


def frame(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Make a data frame that keeps values as they are."""
    import pandas as pd  # takes half a second, so it is imported only for a table

    return pd.DataFrame([list(row) for row in rows], columns=list(columns), dtype=object)


def _json(sheet: Sheet) -> str:
    columns, rows = _numbers(sheet)
    names = [column.name for column in columns]
    answer: dict[str, Any] = {
        "columns": [{"name": column.name, "type": column.type, "unit": column.unit} for column in columns],
        "rows": [dict(zip(names, row, strict=True)) for row in rows],
        "next": sheet.next,
    }
    if sheet.missing is not None:
        answer["missing"] = list(sheet.missing)
    if sheet.about is not None:
        answer |= sheet.about
    return json.dumps(answer, allow_nan=False)


def _csv(sheet: Sheet) -> str:
    columns, rows = _numbers(sheet)
    cells = [[_csv_cell(value) for value in row] for row in rows]
    return str(frame([_csv_cell(column.name) for column in columns], cells).to_csv(index=False, lineterminator="\n"))


def _csv_cell(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula, as one that it shows; numbers stay numbers.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if not isinstance(value, str):
        return value
    shown = f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    # The writer puts quotes around its own line break, but not around this one, which ends a row as well.
    return shown.replace("\r\n", "\n").replace("\r", "\n")


def _numbers(sheet: Sheet) -> tuple[list[Column], list[list[Any]]]:
    """Return the sheet with several columns for each metric; all its cells are scalars."""
    columns: list[Column] = []
    for column in sheet.columns:
        if column.role != "metric":
            columns.append(column)
            continue
        columns.append(column)
        if sheet.spreads:
            columns.append(Column(f"{column.name}_std", "number", column.unit))
        columns += [Column(f"{column.name}_n", "integer"), Column(f"{column.name}_outcome", "string")]
    rows = [[part for value in row for part in _parts(value, spreads=sheet.spreads)] for row in sheet.rows]
    return columns, rows


def _parts(value: Any, *, spreads: bool) -> Iterator[Any]:
    if not isinstance(value, Cell):
        yield value
        return
    yield value.value
    if spreads:
        yield value.spread
    yield value.n
    yield value.outcome


def _markdown(sheet: Sheet) -> str:
    notes = "".join(f"- {_one_line(note)}\n" for note in sheet.notes)
    notes = f"\n{notes}" if notes else ""
    if not sheet.rows:
        return EMPTY + notes
    import tabulate

    columns, rows = _texts(sheet)
    escaped = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    align = ["right" if _is_right(column) else "left" for column in columns]
    texts = frame([_head(column).replace("|", "\\|") for column in columns], escaped)
    tabulate.MIN_PADDING = 0  # two spaces for each column are a fifth of a terminal's width
    return str(texts.to_markdown(index=False, disable_numparse=True, colalign=align)) + "\n" + notes


def _latex(sheet: Sheet) -> str:
    columns, rows = _texts(sheet)
    texts = frame([_head(column) for column in columns], rows)
    layout = "".join("r" if _is_right(column) else "l" for column in columns)
    notes = "".join(f"% {_one_line(note)}\n" for note in sheet.notes)
    return str(texts.to_latex(index=False, escape=True, column_format=layout)).replace("±", r"$\pm$") + notes


def _html(sheet: Sheet) -> str:
    """Write a table element without styles.

    Cells that hold numbers, and their heads, have the class "number"; texts too long for one line the class "long".
    """
    columns, rows = _texts(sheet)
    numeric = [_is_right(column) or column.type in ("number", "integer") for column in columns]
    heads = [_html_cell("th", _head(column), right) for column, right in zip(columns, numeric, strict=True)]
    lines = ["<table>", f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>"]
    shown = [index for index, column in enumerate(sheet.columns) if column.in_text]
    for texts, values in zip(rows, sheet.rows, strict=True):
        cells = [_html_cell("td", text, _is_number(values[index])) for text, index in zip(texts, shown, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    notes = [f"<p>{html.escape(note)}</p>" for note in sheet.notes]
    return "\n".join([*lines, "</tbody>", "</table>", *notes, ""])


def _one_line(note: str) -> str:
    return " ".join(note.split())


def _html_cell(tag: str, text: str, is_number: bool) -> str:
    name = "number" if is_number else "long" if len(text) > LONG else None
    attribute = f' class="{name}"' if name else ""
    return f"<{tag}{attribute}>{html.escape(text)}</{tag}>"


_RENDERERS: dict[str, Callable[[Sheet], str]] = {
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
    "html": _html,
}


def _texts(sheet: Sheet) -> tuple[list[Column], list[list[str]]]:
    """Return the columns and cells that people see."""
    shown = [(index, column) for index, column in enumerate(sheet.columns) if column.in_text]
    return [column for _, column in shown], [
        [_text(row[index], column) for index, column in shown] for row in sheet.rows
    ]


def _is_right(column: Column) -> bool:
    return column.role == "metric" or (column.role == "value" and column.type in ("number", "integer"))


def _is_number(value: Any) -> bool:
    number = value.value if isinstance(value, Cell) else value
    return isinstance(number, int | float) and not isinstance(number, bool)


_IN_NAMES = {"%": "percent", "µs": "us", "GB/s": "gb_per_s", "TFLOP/s": "tflops"}
"""How names of columns spell units that are no words."""


def _head(column: Column) -> str:
    """Return the column's name, with its unit where the name does not tell it."""
    if column.unit in (None, "1") or column.role == "metric":
        return column.name
    told = _IN_NAMES.get(column.unit, column.unit.lower())
    is_told = f"_{told}_" in "_" + re.sub(r"\W+", "_", column.name.lower()) + "_"
    return column.name if is_told else f"{column.name} ({column.unit})"


def _text(value: Any, column: Column) -> str:
    if isinstance(value, Cell):
        return cell_text(value, column.unit)
    if value is None:
        return ""
    if isinstance(value, float) and column.role == "value":
        return _digits(value, column.unit)
    return str(value).lower() if isinstance(value, bool) else str(value)


TOO_SMALL = 1e-6
"""A smaller number, which six decimals would show as 0, is written with an exponent."""


PURE_DECIMALS = 4
"""Fewest decimals of a number without a unit: a sum of 10.0001 is another one than 10.0021."""


def cell_text(cell: Cell, unit: str | None = None) -> str:
    """Write a metric of a case: "21.346 ± 0.012", "oom", or nothing where it was not measured."""
    if cell.outcome is None:
        return ""
    if cell.outcome != "ok" or cell.value is None:
        return "unknown" if cell.outcome == "ok" else cell.outcome
    value, spread = cell.value, cell.spread
    if spread is None or cell.n is None or cell.n < 2:
        return _digits(value, unit)
    if spread == 0 and float(value).is_integer():
        return f"{value:.0f} ± 0"
    if any(0 < abs(number) < TOO_SMALL for number in (value, spread)):
        return f"{value:.3g} ± {spread:.2g}"
    # The deviation's two leading digits set the number of the mean's digits that mean something.
    decimals = _decimals(spread, 2) if spread > 0 else _decimals(value, 4)
    return f"{value:.{decimals}f} ± {spread:.{decimals}f}"


def _digits(value: float, unit: str | None) -> str:
    """Write four digits of a number; a whole one, as counts are, without decimals."""
    if float(value).is_integer():
        return f"{value:.0f}"
    if abs(value) < TOO_SMALL:
        return f"{value:.3g}"
    decimals = _decimals(value, 4)
    return f"{value:.{max(decimals, PURE_DECIMALS) if unit == '1' else decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimals that shows `digits` significant digits of `value`, at most 6."""
    if value == 0:
        return 0
    return min(6, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
