"""Markdown tables on a terminal."""

import re

import pytest

from flopwatch.text.markdown_tables import CUT_NOTE, LONGEST, escaped_line, shortened


def test_long_cells_lose_their_middle() -> None:
    name = "void at::native::" + "x" * 300 + r"<4\|float>"
    rows = [f"| {name} |  1.5 |", f"| {'a'.ljust(len(name))} | 22.5 |"]
    table = "\n".join([f"| {'name'.ljust(len(name))} |   ms |", f"|:{'-' * (len(name) + 1)}|-----:|", *rows])
    text = shortened(f"kernels:\n\n{table}\n\n- a note\n")
    title, _, *lines = text.splitlines()
    assert {len(line) for line in lines[:4]} == {LONGEST + len("|  |      |")}, "aligned"
    assert re.fullmatch(r"\| void at::native::x+…x+<4\\\|float> \|  1.5 \|", lines[2])
    assert (title, lines[1][-8:], lines[3][-8:]) == ("kernels:", "|-----:|", "| 22.5 |")
    assert text.endswith(f"- a note\n\n{CUT_NOTE}\n")


@pytest.mark.parametrize("shift", range(6))
def test_a_cut_parts_no_escape(shift: int) -> None:
    """Else a backslash would stand alone, or a bar that ends the cell."""
    name = "x" * shift + r"\|\<" * 40
    row = shortened(f"| a |\n|:--|\n| {name} |\n").splitlines()[2]
    assert re.fullmatch(r"\| x*(\\[|<])+…(\\[|<])+ \|", row), row


@pytest.mark.parametrize(
    "text", ["| a |\n|:--|\n| b |\n\n- note\n", "| a… |\n|:--|\n| b |\n", "No results.\n", "x" * 200 + "\n"]
)
def test_a_text_that_fits_is_unchanged(text: str) -> None:
    assert shortened(text) == text


def test_a_note_stays_one_line_so_that_code_in_it_ends_where_it_says() -> None:
    assert escaped_line("value `x\n\n<img src=x>` of *a*") == "value `x  <img src=x>` of \\*a\\*"
