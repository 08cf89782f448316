"""Writes a sheet as text: JSON and CSV with every number, Markdown, LaTeX and HTML for people."""

import csv
import html
import io
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from app.metrics import readable
from app.results.digits import column_texts
from app.results.heads import more_columns, name_beside, separated
from app.results.sheet import Cell, Column, Sheet
from flopwatch.table_options import Format
from flopwatch.text.markdown_tables import CODE, escaped, escaped_line
from flopwatch.text.values import value_text

EMPTY = "No results.\n"
LONG = 40
"""Pages wrap texts with more characters than this, in a column wide enough to read them."""
SITE = "/"
"""The server's address in links on its own pages."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def render(sheet: Sheet, format: Format, *, base_url: str | None = None) -> str:  # noqa: A002  (the parameter's name)
    """Write a table of results as text.

    JSON ({"columns", "rows", "next"}, with "missing" and "notes" for measurements) and CSV have every column; a metric
    has its value, `_low` and `_high` beside a median, `_std` beside a mean, `_n` and `_outcome`. Markdown, LaTeX and
    HTML have the value ± its spread, or the outcome in words, signs on rows that are not valid or only partial, and the
    sheet's notes below.

    Args:
        base_url: the server's address with a "/" at its end, for links to jobs; None: HTML has links within the site,
            Markdown and LaTeX have none.
    """
    return _RENDERERS[format](sheet, base_url)


def _json(sheet: Sheet, _base_url: str | None) -> str:
    columns, rows = _scalars(sheet)
    names = [column.name for column in columns]
    answer: dict[str, Any] = {
        "columns": [{"name": column.name, "type": column.type, "unit": column.unit} for column in columns],
        "rows": [dict(zip(names, row, strict=True)) for row in rows],
        "next": sheet.next,
    }
    if sheet.missing is not None:
        answer |= {"missing": list(sheet.missing), "notes": list(sheet.notes)}
    if sheet.about is not None:
        answer |= sheet.about
    return json.dumps(answer, allow_nan=False, default=vars)  # of dataclasses


def _csv(sheet: Sheet, _base_url: str | None) -> str:
    columns, rows = _scalars(sheet)
    text = io.StringIO()
    lines = [[column.name for column in columns], *rows]
    csv.writer(text, lineterminator="\n").writerows([[_csv_cell(value) for value in row] for row in lines])
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet runs as a formula: texts are escaped, numbers stay numbers.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(value, bool):
        return value_text(value)
    if not isinstance(value, str):
        return value
    shown = f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    # Readers take this line break for the end of a row, even inside quotes.
    return shown.replace("\r\n", "\n").replace("\r", "\n")


def _scalars(sheet: Sheet) -> tuple[list[Column], list[list[Any]]]:
    """Return the columns and rows of JSON and CSV, whose cells are scalars: each metric has several columns."""
    columns: list[Column] = []
    parts: list[Callable[[Cell], tuple[Any, ...]] | None] = []
    """For each column of the sheet the function that gives the scalars of a cell; None if its cells are scalars."""
    for column in sheet.columns:
        columns.append(column)
        more = more_columns(column, sheet)
        columns += [Column(name_beside(column, suffix), type_, unit) for suffix, _, type_, unit in more]
        parts.append(attrgetter("value", *(attribute for _, attribute, _, _ in more)) if more else None)
    rows = [
        [part for value, of in zip(row, parts, strict=True) for part in ((value,) if of is None else of(value))]
        for row in sheet.rows
    ]
    return columns, rows


class _Texts:
    """The shown columns of a sheet and the texts of their cells, the same in all formats for people."""

    def __init__(self, sheet: Sheet) -> None:
        sheet = separated(sheet) if sheet.separate else sheet
        shown = [(index, column) for index, column in enumerate(sheet.columns) if column.in_text]
        self.columns = [column for _, column in shown]
        self.values = [[row[index] for index, _ in shown] for row in sheet.rows]
        by_column = [column_texts([row[at] for row in self.values], column) for at, column in enumerate(self.columns)]
        self.rows = [list(row) for row in zip(*by_column, strict=True)] if by_column else []
        self.marks = sheet.marks or [""] * len(self.rows)
        groups = list(dict.fromkeys(column.group for column in self.columns if column.group is not None))
        is_named = any(column.group in column.literal for column in self.columns)
        self.groups = groups if len(groups) > 1 or is_named else []
        """The groups that column heads have to name."""
        of_one = [f"{groups[0]}."] if len(groups) == 1 and sheet.notes and not is_named else []
        self.notes = [f"All columns of numbers are {text}" for text in of_one] + list(sheet.notes)

    def is_right(self, column: Column) -> bool:
        return column.role in ("metric", "gain") or (column.role == "value" and column.type in ("number", "integer"))

    def is_numeric(self, column: Column) -> bool:
        return self.is_right(column) or column.type in ("number", "integer")

    def plain_head(self, column: Column) -> str:
        """Return the column's name as queries use it, with its unit unless the name contains it."""
        if column.group is not None and not self.groups:
            return str(column.head)
        if column.unit in (None, "1") or column.literal or column.role in ("metric", "gain"):
            return column.name
        return column.name if _names_unit(column.name, column.unit) else f"{column.name} ({column.unit})"

    def mark(self, row: int, at: int) -> str:
        """Return the signs after a cell: those of its row after the first cell, and its own."""
        value = self.values[row][at]
        return str(self.marks[row]) if at == 0 and self.marks[row] else value.mark if isinstance(value, Cell) else ""

    def is_best(self, row: int, at: int) -> bool:
        value = self.values[row][at]
        return isinstance(value, Cell) and value.best


def _names_unit(name: str, unit: str) -> bool:
    """Return True if a name contains a unit, as a word or as names of columns spell it."""
    words = "_" + re.sub(r"\W+", "_", name.lower()) + "_"
    spelled = (re.sub(r"\W+", "_", unit.lower()).strip("_"), _IN_NAMES.get(unit, unit))
    return (unit == "%" and unit in name) or any(f"_{one}_" in words for one in spelled if one)


_IN_NAMES = {"%": "percent", "µs": "us", "GB/s": "gb_per_s", "TFLOP/s": "tflops"}
"""The spelling in column names of units that are not words."""


def _job_links(text: str, link: Callable[[str], str]) -> str:
    return re.sub(r"\d+", lambda number: link(number[0]), text)


def _markdown(sheet: Sheet, base_url: str | None) -> str:
    texts = _Texts(sheet)
    notes = "".join(f"- {escaped_line(_one_line(note))}\n" for note in texts.notes)
    notes = f"\n{notes}" if notes else ""
    lead = "".join(f"{escaped_line(_one_line(sentence))}\n\n" for sentence in sheet.lead)
    if not sheet.rows:
        return lead + EMPTY + notes
    import tabulate

    def cell(row: int, at: int, text: str) -> str:
        written = escaped(text)
        if base_url is not None and texts.columns[at].links:
            written = _job_links(written, lambda job: f"[{job}]({base_url}ui/jobs/{job})")
        if texts.is_best(row, at):
            written = f"**{written}**"
        return " ".join(filter(None, (written, texts.mark(row, at))))

    heads = [escaped(texts.plain_head(column)) for column in texts.columns]
    rows = [[cell(row, at, text) for at, text in enumerate(cells)] for row, cells in enumerate(texts.rows)]
    align = ["right" if texts.is_right(column) else "left" for column in texts.columns]
    tabulate.MIN_PADDING = 0  # two spaces for each column are a fifth of a terminal's width
    body = tabulate.tabulate(rows, headers=heads, tablefmt="pipe", disable_numparse=True, colalign=align)
    title = f"**{escaped(_one_line(sheet.caption))}**\n\n" if sheet.caption else ""
    return f"{lead}{title}{body}\n{notes}"


def _latex(sheet: Sheet, base_url: str | None) -> str:
    """Write a `tabular` with booktabs' rules, scaled to the line if it is wider; with a caption or a label, inside a
    `table`."""
    texts = _Texts(sheet)
    floats = sheet.caption is not None or sheet.latex_label is not None
    linked = base_url is not None and any(column.links for column in texts.columns)

    def cell(row: int, at: int, text: str) -> str:
        written = _tex(text)
        if base_url is not None and texts.columns[at].links:
            written = _job_links(written, lambda job: rf"\href{{{base_url}ui/jobs/{job}}}{{{job}}}")
        if texts.is_best(row, at):
            written = rf"\textbf{{{written}}}"
        mark = texts.mark(row, at)
        return written + (rf"\textsuperscript{{{_tex(mark)}}}" if mark else "")

    body = [_latex_row([cell(row, at, text) for at, text in enumerate(cells)]) for row, cells in enumerate(texts.rows)]
    layout = "".join("r" if texts.is_right(column) else "l" for column in texts.columns)
    lines = [
        f"% Needs \\usepackage{{booktabs,graphicx{',hyperref' if linked else ''}}}",
        *(f"% {_one_line(sentence)}" for sentence in sheet.lead),
        *([r"\begin{table}", r"\centering"] if floats else []),
        *([rf"\caption{{{_tex(sheet.caption)}}}"] if sheet.caption is not None else []),
        *([rf"\label{{{sheet.latex_label}}}"] if sheet.latex_label is not None else []),
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        *_latex_heads(texts),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par\smallskip{{\footnotesize {_tex_line(note)}\par}}" for note in texts.notes),
        *([r"\end{table}"] if floats else []),
    ]
    return "\n".join(lines) + "\n"


def _latex_heads(texts: _Texts) -> list[str]:
    heads = []
    for column in texts.columns:
        if column.head is None:
            heads.append(_tex(_for_print(column, column.name, column.unit)))
        else:
            coordinate, _, value = column.head.partition("=")
            heads.append(_tex(f"{_for_print(column, coordinate)} = {value}"))
    if not texts.groups:
        return [_latex_row(heads)]
    above, rules, at = [], [], 0
    while at < len(texts.columns):
        column, start = texts.columns[at], at
        while at < len(texts.columns) and column.group is not None and texts.columns[at].group == column.group:
            at += 1
        if column.group is None:
            above.append("")
            at += 1
            continue
        above.append(rf"\multicolumn{{{at - start}}}{{c}}{{{_tex(_for_print(column, column.group, column.unit))}}}")
        rules.append(rf"\cmidrule(lr){{{start + 1}-{at}}}")
    return [_latex_row(above), "".join(rules), _latex_row(heads)]


def _latex_row(cells: Sequence[str]) -> str:
    """Write a row, whose first cell must not look like an option of the end of the row before: `\\*` or `\\[2pt]`."""
    row = f"{' & '.join(cells)} \\\\"
    return "{}" + row if row.lstrip().startswith(("[", "*")) else row


def _for_print(column: Column, name: str, unit: str | None = None) -> str:
    return name if name in column.literal else readable(name, unit)


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "µ": r"$\mu$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "…": r"\ldots{}",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
    "\t": " ",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _greek(letter: str) -> str:
    name = unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA")
    return rf"$\{name.lower() if letter.islower() else name.title()}$"


_TEX |= {letter: _greek(letter) for letter in "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"}
_TYPESET = re.compile(r"[ -~À-ÖØ-öø-ÿ–—‘’“”]")
"""Characters that every LaTeX since 2018 can typeset with its own fonts, beside what _TEX writes otherwise."""


def _tex(text: str) -> str:
    """Escape a text for LaTeX. What its fonts lack becomes its name, "[rocket]", or its number, "[U+4E2D]"."""
    return "".join(_TEX.get(character) or _typeset(character) for character in text)


def _tex_line(text: str) -> str:
    """Escape a sentence for LaTeX, and mark up parts in `backticks` as code."""
    # CODE has one group, so every second part is the inside of one.
    parts = CODE.split(_one_line(text))
    return "".join(rf"\texttt{{{_tex(part)}}}" if at % 2 else _tex(part) for at, part in enumerate(parts))


def _typeset(character: str) -> str:
    if _TYPESET.match(character) and character not in "ÐÞðþ":
        return character
    if unicodedata.category(character).startswith("S"):
        return f"[{unicodedata.name(character).lower()}]"
    return f"[U+{ord(character):04X}]"


def _html(sheet: Sheet, base_url: str | None) -> str:
    """Write a table element without styles. Columns of numbers have the class "number" in head and cells; texts too
    long for one line the class "long"; a row with a sign the class "marked". The best cell of a column stands in
    "strong"."""
    texts = _Texts(sheet)
    site = SITE if base_url is None else base_url

    def cell(row: int, at: int, text: str) -> str:
        written = html.escape(text)
        if texts.columns[at].links:
            written = _job_links(written, lambda job: f'<a href="{html.escape(site)}ui/jobs/{job}">{job}</a>')
        if texts.is_best(row, at):
            written = f"<strong>{written}</strong>"
        mark = texts.mark(row, at)
        written += f"<sup>{html.escape(mark)}</sup>" if mark else ""
        return _html_cell("td", text, texts.is_numeric(texts.columns[at]), written)

    lines = [*(f"<p>{with_code(sentence)}</p>" for sentence in sheet.lead), "<table>"]
    if sheet.caption:
        lines.append(f"<caption>{html.escape(sheet.caption)}</caption>")
    lines += [f"<thead>{_html_heads(texts)}</thead>", "<tbody>"]
    for row, cells in enumerate(texts.rows):
        start = '<tr class="marked">' if texts.marks[row] else "<tr>"
        lines.append(f"{start}{''.join(cell(row, at, text) for at, text in enumerate(cells))}</tr>")
    notes = [f"<p>{with_code(note)}</p>" for note in texts.notes]
    return "\n".join([*lines, "</tbody>", "</table>", *notes, ""])


def with_code(text: str) -> str:
    """Escape a text for HTML, and mark up parts in `backticks` as code."""
    return CODE.sub(r"<code>\1</code>", html.escape(text))


def _html_heads(texts: _Texts) -> str:
    numeric = list(map(texts.is_numeric, texts.columns))
    if not texts.groups:
        heads = zip(texts.columns, numeric, strict=True)
        cells = "".join(_html_cell("th", texts.plain_head(column), right) for column, right in heads)
        return f"<tr>{cells}</tr>"
    above, below, done = [], [], set()
    for column, right in zip(texts.columns, numeric, strict=True):
        if column.group is None:
            above.append(f'<th rowspan="2"{_class(right)}>{html.escape(texts.plain_head(column))}</th>')
            continue
        if column.group not in done:
            done.add(column.group)
            width = sum(other.group == column.group for other in texts.columns)
            above.append(f'<th colspan="{width}">{html.escape(column.group)}</th>')
        below.append(_html_cell("th", str(column.head), right))
    return f"<tr>{''.join(above)}</tr><tr>{''.join(below)}</tr>"


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _one_line(note: str) -> str:
    return " ".join(note.split())


def _html_cell(tag: str, text: str, is_number: bool, written: str | None = None) -> str:
    name = "number" if is_number else "long" if len(text) > LONG else None
    attribute = f' class="{name}"' if name else ""
    return f"<{tag}{attribute}>{html.escape(text) if written is None else written}</{tag}>"


_RENDERERS: dict[str, Callable[[Sheet, str | None], str]] = {
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
    "html": _html,
}
