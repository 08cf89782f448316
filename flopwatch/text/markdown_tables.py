"""Escapes texts for Markdown, and shortens its tables for a terminal. Standard library only."""

import itertools
import re
from collections.abc import Sequence

LONGEST = 60
"""Largest number of characters of a table's cell on a terminal: a kernel's name may have a thousand."""
CUT_NOTE = "Long texts are shortened (…) on a terminal; in a file, and with --format csv or json, they are whole."


# An underscore inside a word means nothing. An address would become a link, in which escapes are shown as they are.
_MARKUP = re.compile(
    r"[\\`*<|~$] | \](?=[(\[:]) | (?<!\w)_+ | _+(?!\w) | &(?=\#?\w+;) | :(?=//) | (?<=www)\.",
    re.VERBOSE | re.IGNORECASE,
)
_AT_START = re.compile(r"\d{1,9}(?=[.)])|(?=[#+>-]|\[[ x]\])", re.IGNORECASE)


def escaped(text: str) -> str:
    """Escape a text for a table's cell, or for the inside of a line, so that every renderer of CommonMark or GitHub's
    Markdown shows it as it is typed."""
    return _MARKUP.sub(lambda match: "".join(f"\\{character}" for character in match[0]), " ".join(text.splitlines()))


CODE = re.compile(r"`([^`]+)`")
"""A part of a sentence that is code, most often a command."""


def escaped_line(text: str) -> str:
    """Escape a text for a line of its own, or an item of a list: it begins no list, heading or quotation. Parts in
    `backticks` stay code."""
    text = " ".join(text.splitlines())  # a blank line ends code, too
    ends = [0, *(end for code in CODE.finditer(text) for end in code.span()), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(ends)]
    line = "".join(part if at % 2 else escaped(part) for at, part in enumerate(parts))
    begins = _AT_START.match(line)
    return line if begins is None else f"{begins[0]}\\{line[begins.end() :]}"


def shortened(markdown: str) -> str:
    """Shorten the long cells of Markdown tables in their middle, for a terminal, and say so below.

    Columns stay aligned. The beginning of a name identifies the kernel, the end its types or shape.
    """
    parts = parsed(markdown)
    short = [part if isinstance(part, str) else [[cut(cell) for cell in row] for row in part] for part in parts]
    if short == parts:
        return markdown
    texts = [part if isinstance(part, str) else "\n".join(_aligned(part)) for part in short]
    return "\n".join(texts).rstrip("\n") + f"\n\n{CUT_NOTE}\n"


def parsed(markdown: str) -> list[str | list[list[str]]]:
    """Return the lines outside tables, and each table as its rows of cells, the second of which says how its columns
    are aligned."""
    parts: list[str | list[list[str]]] = []
    for line in markdown.split("\n"):
        if not line.startswith("|"):
            parts.append(line)
            continue
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if parts and isinstance(parts[-1], list):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def is_right(rule: str) -> bool:
    """Return True if a table's second row aligns this column at the right."""
    return rule.endswith(":") and not rule.startswith(":")


def unescaped(text: str) -> str:
    """Remove the backslashes before punctuation: the text as a renderer shows it."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)


def cut(text: str) -> str:
    """Leave the middle of a long text out, but never half of an escape."""
    if len(text) <= LONGEST or not text.strip(":-"):
        return text
    end = LONGEST // 3
    start, rest = text[: LONGEST - 1 - end], text[-end:]
    if _ends_in_escape(start):
        start = start[:-1]
    if _ends_in_escape(text[:-end]):
        rest = rest[1:]
    return f"{start}…{rest}"


def _ends_in_escape(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of one table, the second of which says how its columns are aligned."""
    rights = [is_right(rule) for rule in table[1]]
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
