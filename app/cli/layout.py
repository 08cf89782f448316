"""Lays tables and sentences out for the width of a terminal."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from flopwatch.text.numbers import NOTHING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST_UNBROKEN = 28
"""A column whose longest cell has at most so many characters is not wrapped."""
LEAST_WRAPPED = 20
"""Text is not wrapped to fewer characters than this."""
_BEGIN = re.compile(r"\s*(?:- )?")
GAP = 2
"""Spaces between columns."""
EMPTY = ("", NOTHING)
_HASH = re.compile(r"\b[0-9a-f]{32,64}\b")
SHOWN_OF_HASH = 8

Rows = Sequence[Sequence[str]]


def table(head: Sequence[str], rows: Rows, rights: Collection[int] = ()) -> str:
    """Write a table so that it fits the terminal.

    A column with the same text in all rows stands once above the table, one without any text is left out, and hashes
    are cut to their first 8 characters. Columns for which there is no place follow in further tables, each of which
    begins with the columns that identify the rows.

    rights: indices of the columns of numbers, which are aligned at the right and stay in the table.
    """
    width = shutil.get_terminal_size().columns
    short = [[_HASH.sub(lambda found: found[0][:SHOWN_OF_HASH], text) for text in row] for row in rows]
    same = [
        at for at in range(len(head)) if at not in rights and len(short) > 1 and len({row[at] for row in short}) == 1
    ]
    varying = [at for at in range(len(head)) if at not in same] or list(range(len(head)))
    facts = [f"{head[at]}: {short[0][at]}" for at in same if at not in varying and short[0][at] not in EMPTY]
    parts = [wrapped(", ".join(facts), width)] if facts else []
    names = [_broken_name(head[at], max((len(row[at]) for row in short), default=0)) for at in varying]
    columns = [[name, *(row[at] for row in short)] for name, at in zip(names, varying, strict=True)]
    parts += [
        _written(
            [columns[at] for at in block], {place for place, at in enumerate(block) if varying[at] in rights}, width
        )
        for block in _blocks(columns, width)
    ]
    return "\n\n".join(parts)


def wrapped(text: str, width: int | None = None) -> str:
    """Wrap each line of a text at the terminal's width, and indent its continuations as itself."""
    from rich.text import Text

    width = width or shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        begin = line[: len(_BEGIN.match(line)[0])]  # type: ignore[index]  # it always matches
        rest = _render(Text(line[len(begin) :]), max(width - len(begin), LEAST_WRAPPED))
        lines.append(begin + rest.replace("\n", "\n" + " " * len(begin)))
    return "\n".join(lines)


def _broken_name(name: str, width: int) -> str:
    """Break a column's name at underscores if it is longer than the column's cells."""
    lines = [""]
    for part in re.findall(r"[^_]*_+|[^_]+", name):
        if len(lines[-1] + part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _least(column: Sequence[str]) -> int:
    """Return the least width of a column: of its longest line, but at most WIDEST_UNBROKEN."""
    return min(WIDEST_UNBROKEN, _widest(line for text in column for line in text.split("\n")))


def _widest(texts: Iterable[str]) -> int:
    """Return the number of a terminal's cells that the widest text takes: a Chinese character takes two."""
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _blocks(columns: Rows, width: int) -> Iterator[list[int]]:
    """Divide columns into tables that fit, each of which begins with the columns that identify the rows, unless these
    take more than half of the width."""
    leasts = [_least(column) + GAP for column in columns]
    ends = range(1, len(columns) + 1)
    identifying = next((end for end in ends if len(set(zip(*columns[:end], strict=True))) == len(columns[0])), 1)
    keys = max((end for end in ends[:identifying] if 2 * sum(leasts[:end]) <= width), default=1)
    block = list(range(keys))
    for at in range(keys, len(columns)):
        if len(block) > keys and sum(leasts[shown] for shown in (*block, at)) - GAP > width:
            yield block
            block = list(range(keys))
        block.append(at)
    yield block


def _written(columns: Rows, rights: Collection[int], width: int) -> str:
    from rich.table import Table
    from rich.text import Text

    fits = sum(_least(column) + GAP for column in columns) - GAP <= width
    grid = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="")
    for place, (name, *cells) in enumerate(columns):
        grid.add_column(
            Text(name),
            justify="right" if place in rights else "left",
            vertical="top",
            overflow="fold",
            no_wrap=(fits or place in rights) and _widest(cells) <= WIDEST_UNBROKEN,
        )
    for row in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, row))
    return _render(grid, width)


def _render(what: RenderableType, width: int) -> str:
    from rich.console import Console

    written = io.StringIO()
    Console(file=written, width=width, color_system=None, force_terminal=False).print(what)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip("\n").split("\n"))
