"""Commands that pause the queue: pause, resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import completing
from app.cli.common import AsJson, with_server
from app.cli.terminal import echo

if TYPE_CHECKING:
    from flopwatch import Flopwatch

ALL = "all"
Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Only jobs of this kind; may be repeated.", autocompletion=completing.kinds),
]


@with_server
def pause(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Stop further jobs from starting; running ones continue."""
    paused = server.paused_kinds()
    if kind is None:
        paused = ALL
    elif paused != ALL:
        paused = sorted({*paused, *kind})
    _set(server, paused, as_json=as_json)


@with_server
def resume(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Let jobs start again after `flopwatch pause`."""
    from flopwatch import ClientError

    paused: list[str] | str = []
    if kind is not None:
        paused = server.paused_kinds()
        if paused == ALL:
            raise ClientError("All kinds are paused: `flopwatch resume` without --kind lets them go on.")
        paused = sorted(set(paused) - set(kind))
    _set(server, paused, as_json=as_json)


COMMANDS = (pause, resume)


def _set(server: Flopwatch, kinds: list[str] | str, *, as_json: bool) -> None:
    from app.cli.output import print_json
    from flopwatch import ClientError, Refused

    try:
        answer = server.set_paused_kinds(kinds)
    except Refused as refused:
        # The user gave an option, not the list to which the pointers refer.
        if not refused.errors or kinds == ALL:
            raise
        wrong = [f"--kind {kinds[int(error.pointer.rpartition('/')[2])]}: {error.detail}" for error in refused.errors]
        raise ClientError("\n".join(wrong)) from refused
    if as_json:
        print_json(answer)
        return
    paused = answer["kinds"]
    named = "all kinds" if paused == ALL else ", ".join(paused)
    echo(f"paused: {named}" if paused else "nothing is paused")
