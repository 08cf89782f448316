"""Shortens tables in Markdown for a terminal. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 60
"""Largest number of characters of a table's cell on a terminal: a kernel's name may have a thousand."""
CUT_NOTE = "Long texts are shortened (…) on a terminal; in a file, and with --format csv or json, they are whole."


def shortened(markdown: str) -> str:
    """Shorten the long cells of Markdown tables in their middle, for a terminal, and say so below.

    Columns stay aligned. The beginning of a name identifies the kernel, the end its types or shape.
    """
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else line
        for line in markdown.split("\n")
    ]
    cut = [line if isinstance(line, str) else [_cut(cell) for cell in line] for line in lines]
    if cut == lines:
        return markdown
    texts: list[str] = []
    table: list[list[str]] = []
    for line in [*cut, ""]:
        if isinstance(line, str):
            texts += _aligned(table)
            table = []
            texts.append(line)
        else:
            table.append(line)
    return "\n".join(texts[:-1]).rstrip("\n") + f"\n\n{CUT_NOTE}\n"


def _cut(text: str) -> str:
    if len(text) <= LONGEST or not text.strip(":-"):
        return text
    end = LONGEST // 3
    return f"{text[: LONGEST - 1 - end]}…{text[-end:]}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of one table, the second of which says how its columns are aligned."""
    if not table:
        return []
    rights = [rule.endswith(":") and not rule.startswith(":") for rule in table[1]]
    widths = [max(len(row[at]) for row in (table[0], *table[2:])) for at in range(len(rights))]
    lines = []
    for number, row in enumerate(table):
        if number == 1:
            rules = (
                "-" * (width + 1) + ":" if right else ":" + "-" * (width + 1)
                for width, right in zip(widths, rights, strict=True)
            )
            lines.append(f"|{'|'.join(rules)}|")
        else:
            cells = (
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(row, widths, rights, strict=True)
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines
