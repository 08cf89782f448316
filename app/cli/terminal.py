"""Prints texts of jobs and other users with their control characters escaped (app/text/characters.py).

They are escaped wherever the output goes, as `journalctl` does, since a file of today may be shown on a terminal
tomorrow. `--raw` prints them unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

import typer

from app.text.characters import in_json, one_line, shown
from app.text.markdown_tables import shortened

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
    typer.echo(text if _raw.get() else shown(text), nl=nl, err=err, color=True)


def echo_table(markdown: str) -> None:
    """Print tables in Markdown; on a terminal, without the middle of long texts."""
    fits = shortened(markdown) if sys.stdout.isatty() else markdown
    echo(fits, nl=not fits.endswith("\n"))


def echo_json(text: str) -> None:
    """Print JSON. It remains the same JSON, with control characters escaped as JSON does."""
    typer.echo(in_json(text), nl=not text.endswith("\n"))


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and exit."""
    echo(f"error: {message}", err=True)
    raise typer.Exit(code)
