"""Prints texts of jobs and other users with their control characters escaped (flopwatch/text/characters.py).

They are escaped wherever the output goes, as `journalctl` does, since a file of today may be shown on a terminal
tomorrow. `--raw` prints them unchanged.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import typer

from flopwatch.text.characters import in_json, one_line, shown
from flopwatch.text.markdown_tables import CUT_NOTE, cut, is_right, parsed, unescaped

T = TypeVar("T")

_raw: ContextVar[bool] = ContextVar("raw", default=False)


@contextmanager
def raw(wanted: bool = True) -> Iterator[None]:
    """Inside this context, if `wanted`, texts are printed unchanged."""
    token = _raw.set(wanted)
    try:
        yield
    finally:
        _raw.reset(token)


def cell(text: str) -> str:
    """Return an untrusted text in a form that can be part of a line."""
    return text if _raw.get() else one_line(text)


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text. All commands print with this function or with `echo_json`."""
    # color: otherwise typer would drop some control characters if the output is not a terminal.
    typer.echo(_shown(text), nl=nl, err=err, color=True)


def _shown(text: str) -> str:
    return text if _raw.get() else shown(text)


def width(*, err: bool = False) -> int | None:
    """Return for how many columns all commands lay out tables and sentences: COLUMNS, or the terminal's width.

    None where there is neither: another program reads whole lines.
    """
    is_read = (sys.stderr if err else sys.stdout).isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if is_read else None


def echo_table(markdown: str) -> None:
    """Print tables in Markdown; where there is a width as columns that fit, without the middle of long texts."""
    if width() is None:
        echo(markdown, nl=not markdown.endswith("\n"))
        return
    from app.cli import layout

    is_cut = False
    for part in parsed(_shown(markdown).rstrip("\n")):
        if isinstance(part, str):
            echo(layout.wrapped(unescaped(part)))
            continue
        head, rules, *rows = part
        short = [[cut(text) for text in row] for row in rows]
        is_cut |= short != rows
        plain = [[unescaped(text) for text in row] for row in (head, *short)]
        echo(layout.table(plain[0], plain[1:], {at for at, rule in enumerate(rules) if is_right(rule)}))
    if is_cut:
        echo(layout.wrapped(f"\n{CUT_NOTE}"))


def first_of(listed: list[T], limit: int) -> list[T]:
    """Return the first entries of a list, of which one more than `limit` was asked for; on standard error say that
    there are more."""
    if len(listed) > limit:
        echo(f"showing the first {limit}; use --limit for more", err=True)
    return listed[:limit]


def echo_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where there is a width so that it fits."""
    cells = [head, *([cell(text) for text in row] for row in rows)]
    if width() is not None:
        from app.cli import layout

        echo(layout.table(cells[0], cells[1:]))
        return
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        echo("  ".join(text.ljust(widest) for text, widest in zip(row, widths, strict=True)).rstrip())


def echo_line(text: str, *, err: bool = False) -> None:
    """Print a sentence; where there is a width, wrapped."""
    if (columns := width(err=err)) is not None:
        from app.cli import layout

        text = layout.wrapped(_shown(text), columns)
    echo(text, err=err)


def echo_json(text: str) -> None:
    """Print JSON. It remains the same JSON, with control characters escaped as JSON does."""
    typer.echo(in_json(text), nl=not text.endswith("\n"))


def echo_bytes(content: bytes) -> None:
    typer.echo(content, nl=False)


def fail(message: str, code: int = 1) -> NoReturn:
    echo_line(f"error: {message}", err=True)
    raise typer.Exit(code)
