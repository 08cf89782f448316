"""Sheets in the five formats."""

import csv
import io
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from app.results import Cell, Column, Sheet, merged, renamed, render
from app.results.digits import cell_text
from app.results.sheet import NOT_MEASURED

OK = {"n": 10, "outcome": "ok"}
MEASURED = Sheet(
    columns=[
        Column("model", "string", role="coordinate"),
        Column("context_length", "integer", role="coordinate"),
        Column("forward_ms", "number", "ms", role="metric"),
        Column("step_ms", "number", "ms", role="metric"),
        Column("validity", "string", in_text=False),
    ],
    rows=[
        ["small", 256, Cell(21.3456, 0.0123, **OK), Cell(1234.5678, 23.4, **OK), "valid"],
        ["small", 512, Cell(21.3456, None, 1, "ok"), Cell(None, None, None, "oom"), "valid"],
        ["small", 1024, NOT_MEASURED, Cell(None, None, None, "timeout"), None],
    ],
    missing=["context_length=512: oom"],
    statistic="mean",
)
COLUMNS = [
    {"name": "kernel", "type": "string", "unit": None},
    {"name": "total", "type": "number", "unit": "ms"},
    {"name": "peak_mib", "type": "number", "unit": "MiB"},
    {"name": "calls", "type": "integer", "unit": "calls"},
    {"name": "fused", "type": "boolean", "unit": None},
]
REPORTED = merged([(0, COLUMNS, [["gemm|a", 1.23456, 2048.0, 7, True]]), (1, COLUMNS, [["copy", None, 0.1, 1, None]])])


def markdown(sheet: Sheet) -> list[list[str]]:
    lines = render(sheet, "markdown").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


class TestMeasurements:
    def test_markdown(self) -> None:
        cells = markdown(MEASURED)
        assert cells[0] == ["model", "context_length", "forward_ms", "step_ms"]
        assert cells[2:] == [
            ["small", "256", "21.35 ± 0.01", "1235 ± 23"],
            ["small", "512", "21.35", "oom"],
            ["small", "1024", "–", "timeout"],
        ]

    def test_latex(self) -> None:
        text = render(MEASURED, "latex")
        assert r"small & 256 & 21.35 $\pm$ 0.01 & 1235 $\pm$ 23 \\" in text
        assert r"Model & Context length & Forward (ms) & Step (ms) \\" in text
        assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
        assert r"\begin{tabular}{llrr}" in text

    def test_csv_is_numeric(self) -> None:
        rows = list(csv.DictReader(io.StringIO(render(MEASURED, "csv"))))
        assert (rows[0]["context_length"], rows[0]["forward_ms_n"]) == ("256", "10")
        assert (float(rows[0]["forward_ms"]), float(rows[0]["forward_ms_std"])) == (21.3456, 0.0123)
        assert (rows[1]["forward_ms_std"], rows[1]["step_ms"], rows[1]["step_ms_outcome"]) == ("", "", "oom")
        assert [row["validity"] for row in rows] == ["valid", "valid", ""]

    def test_json_is_numeric_and_described(self) -> None:
        answer = json.loads(render(MEASURED, "json"))
        assert answer["columns"][:4] == [
            {"name": "model", "type": "string", "unit": None},
            {"name": "context_length", "type": "integer", "unit": None},
            {"name": "forward_ms", "type": "number", "unit": "ms"},
            {"name": "forward_ms_std", "type": "number", "unit": "ms"},
        ]
        assert [list(row) for row in answer["rows"]] == [[column["name"] for column in answer["columns"]]] * 3
        assert (answer["rows"][0]["step_ms"], answer["rows"][1]["step_ms"]) == (1234.5678, None)
        assert (answer["rows"][1]["step_ms_n"], answer["missing"]) == (None, ["context_length=512: oom"])


class TestLatex:
    @pytest.mark.parametrize(
        ("text", "written"),
        [
            ("a_b & 5 % of #3 {x}", r"a\_b \& 5 \% of \#3 \{x\}"),
            ("C:\\new ~ ^", r"C:\textbackslash{}new \textasciitilde{} \textasciicircum{}"),
            ("4 × 3 µs → ≤ 2", r"4 $\times$ 3 $\mu$s $\rightarrow$ $\leq$ 2"),
            ("$x$", r"\$x\$"),
            ("α = 中 🚀, Müller’s ð", r"$\alpha$ = [U+4E2D] [rocket], Müller’s [U+00F0]"),
            ("[4, 128]", "{}[4, 128]"),
            (" *", "{} *"),
        ],
    )
    def test_what_is_no_markup_does_not_become_one(self, text: str, written: str) -> None:
        assert f"\n{written} \\\\\n" in render(Sheet([Column("a", "string")], [[text]]), "latex")


def test_a_caption_stands_above() -> None:
    sheet = replace(MEASURED, caption="Steps <of> models")
    assert render(sheet, "markdown").startswith("**Steps \\<of> models**\n\n| model")
    assert "<caption>Steps &lt;of&gt; models</caption>" in render(sheet, "html")


class TestReported:
    def test_markdown(self) -> None:
        cells = markdown(REPORTED)
        assert cells[0] == ["unit_index", "kernel", "total (ms)", "peak_mib", "calls", "fused"]
        assert cells[2:] == [["0", r"gemm\|a", "1.235", "2048", "7", "true"], ["1", "copy", "–", "0.1000", "1", "–"]]

    def test_people_see_no_index_of_a_single_unit(self) -> None:
        alone = merged([(0, COLUMNS, [["gemm", 1.0, 2.0, 7, True]])])
        assert markdown(alone)[0][0] == "kernel"
        assert json.loads(render(alone, "json"))["rows"][0]["unit_index"] == 0

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
    def test_no_spreadsheet_runs_a_cell_of_a_csv(self, start: str) -> None:
        text = f'{start}HYPERLINK("http://example.org","x")'
        columns = [Column(f"{start}name", "string"), Column("total", "number"), Column("calls", "integer")]
        sheet = Sheet(columns=columns, rows=[[text, -1.5, -2], ["a=b", 1e-7, None]])
        head, *rows = csv.reader(io.StringIO(render(sheet, "csv"), newline=""))
        start_in_csv = start.replace("\r", "\n")
        assert head == [f"'{start_in_csv}name", "total", "calls"]
        assert rows == [[f"'{text.replace(start, start_in_csv)}", "-1.5", "-2"], ["a=b", "1e-07", ""]]
        assert json.loads(render(sheet, "json"))["rows"][0][f"{start}name"] == text


@pytest.mark.parametrize("sheet", [Sheet([], [], missing=[]), merged([(0, COLUMNS, [])])])
def test_no_rows(sheet: Sheet) -> None:
    assert json.loads(render(sheet, "json"))["rows"] == []
    assert render(sheet, "markdown") == "No results.\n"
    for name in ("csv", "latex", "html"):
        render(sheet, name)  # type: ignore[arg-type]


def test_another_name_is_taken_as_it_is() -> None:
    cell, new = Cell(1.5, None, None, "ok"), "Time in ms"
    plain = renamed(Sheet([Column("value", "number", "ms", role="metric")], [[cell]]), [("value", new)])
    of_pivot = Column("value, T_=8", "number", "ms", role="metric", group="value", head="T_=8")
    pivoted = renamed(Sheet([of_pivot], [[cell]]), [("value", new), ("T_", "L_1")])
    assert (markdown(plain)[0], markdown(pivoted)[0]) == ([new], [f"{new}, L_1=8"])
    assert f"{{c}}{{{new}}}" in render(pivoted, "latex")
    assert "L\\_1 = 8 \\\\" in render(pivoted, "latex"), "name and value stay apart"
    assert [f">{new}</th>" in render(sheet, "html") for sheet in (plain, pivoted)] == [True, True]
    assert render(plain, "csv").startswith(f"{new},")


def test_what_is_no_markup_does_not_become_one() -> None:
    sheet = Sheet([Column("a|b", "string")], [["<script>|"], ["two\nlines"]])
    assert "<script>" not in render(sheet, "html")
    assert "&lt;script&gt;|" in render(sheet, "html")
    assert markdown(sheet)[0] == [r"a\|b"]
    assert r"| \<script>\|" in render(sheet, "markdown")
    assert "two lines" in render(sheet, "markdown")


TYPED = [
    "void at::native::elementwise_kernel<4, float>(int, T1)",
    "__init__ and _x_, a_b__c",
    "<img src=x onerror=alert(1)>",
    "[a link](https://evil.example) <https://evil.example> https://a.example/__b__ www.a.example/_b_",
    "![an image](x.png) [[a]](b) [1] [a][b]",
    "[x] a task",
    "`code` **bold** *it* ~~gone~~ ~x~",
    "a \\ b \\| c \\\\| d | e \\",
    "&lt; &amp; &#42; &",
    "- item",
    "1. first",
    "# heading",
    "> quotation",
    "$x_1$ | $y_2$",
]


class Seen(HTMLParser):
    """The texts of the cells, paragraphs and list items of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, _attributes: Any) -> None:
        self.tags.add(tag)
        if tag in ("th", "td", "p", "li"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


def seen_in(text: str) -> Seen:
    """What GitHub's renderer shows."""
    cmarkgfm = pytest.importorskip("cmarkgfm", reason="pip install -e .[dev]")
    return Seen(str(cmarkgfm.github_flavored_markdown_to_html(text)))


class TestMarkdownRenderers:
    PLAIN = frozenset({"table", "thead", "tbody", "tr", "th", "td", "p", "ul", "li", "strong"})

    @pytest.mark.parametrize("typed", TYPED)
    def test_texts_are_shown_as_typed(self, typed: str) -> None:
        sheet = Sheet([Column(typed, "string")], [[typed]], caption=typed, lead=[typed], notes=[typed])
        seen = seen_in(render(sheet, "markdown"))
        sentence = typed.replace("`", "")  # in which it marks code
        assert [text.strip() for text in seen.texts] == [sentence, typed, typed, typed, sentence]
        assert seen.tags <= self.PLAIN | ({"code"} if "`" in typed else set())

    def test_random_texts_are_shown_as_typed(self, rng: random.Random) -> None:
        for _ in range(300):
            typed = "x" + "".join(rng.choices("\\`*_<>[]()|~#&;:/.!-a1 é", k=rng.randrange(1, 20))) + "x"
            seen = seen_in(render(Sheet([Column(typed, "string")], [[typed]]), "markdown"))
            assert [text.strip() for text in seen.texts] == [typed] * 2


def test_booleans_in_csv_are_those_of_json() -> None:
    assert render(Sheet([Column("causal", "boolean")], [[True], [False], [None]]), "csv") == 'causal\ntrue\nfalse\n""\n'


@pytest.mark.parametrize(
    ("mean", "std", "n", "text"),
    [
        (0.0, None, 1, "0"),
        (2.5, 0.0, 3, "2.500 ± 0.000"),
        (0.000123456, 0.0000012, 5, "0.000123 ± 0.000001"),
        (2.346e-7, None, 1, "2.35e-07"),
        (0.000572, 2.4e-7, 5, "0.000572 ± 2.4e-07"),
        (123456.0, 0.5, 5, "123456.00 ± 0.50"),
        (None, None, 2, "–"),
    ],
)
def test_digits(mean: float | None, std: float | None, n: int, text: str) -> None:
    assert cell_text(Cell(mean, std, n, "ok")) == text


def test_pure_numbers_show_their_decimals() -> None:
    column = Column("sum", "number", "1", role="metric")
    sums = [[Cell(value, None, 1, "ok")] for value in (10.000133514, 9.953125, 10.002136, 0.000134, 10.0)]
    assert [row[0] for row in markdown(Sheet([column], sums))[2:]] == ["10.0001", "9.9531", "10.0021", "0.000134", "10"]
    reported = Sheet([Column("sum", "number", "1")], [[10.000133514]])
    assert markdown(reported)[0] == ["sum"]
    assert markdown(reported)[2] == ["10.0001"]
