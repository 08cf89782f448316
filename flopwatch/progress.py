"""Shows progress while the client waits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from flopwatch.text.characters import one_line

if TYPE_CHECKING:
    from rich.progress import Progress

Show: TypeAlias = Callable[[int, int, str], None]
"""Shows progress: how much is done, of how much (0: nobody knows yet), and a message."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Show]:
    """Show progress as a bar on standard error, with the time that is left, if that is a terminal; in a notebook as a
    line; else nothing."""
    if "ipykernel" in sys.modules:
        show = _Line()
        yield show
        show.end()
        return
    if not sys.stderr.isatty():
        yield lambda _done, _total, _message: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar)


class _Line:
    """Shows progress by one line of a notebook's cell, which each call overwrites."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, done: int, total: int, message: str) -> None:
        text = one_line(f"{done}/{total} {message}" if total else message)
        if text != self._shown:
            self._write(f"\r{text.ljust(len(self._shown))}")
            self._shown = text

    def end(self) -> None:
        """Remove the line."""
        self._write(f"\r{' ' * len(self._shown)}\r")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class _Bar:
    """Shows progress by one of rich's bars; lines about finished cells stay above it."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("waiting", total=None)

    def __call__(self, done: int, total: int, message: str) -> None:
        self._bar.update(self._task, description=one_line(message))
        if total:
            self._bar.update(self._task, completed=done, total=total)

    def tell(self, line: str) -> None:
        self._bar.console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
