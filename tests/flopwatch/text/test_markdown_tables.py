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
    assert title == "kernels:"
    assert len({len(line) for line in lines[:4]}) == 1, "aligned"
    assert len(lines[0]) == LONGEST + len("|  |      |"), lines[0]
    assert lines[2].startswith("| void at::native::xxx")
    assert lines[2].endswith("xx<4\\|float> |  1.5 |")
    assert "…" in lines[2]
    assert lines[3].startswith("| a  ")
    assert lines[3].endswith("| 22.5 |")
    assert lines[1].endswith("|-----:|")
    assert "- a note" in text
    assert text.endswith(f"\n\n{CUT_NOTE}\n")


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
