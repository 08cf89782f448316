"""Commands that pause the queue: pause, resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.jobs import AsJson, with_server
from app.cli.terminal import echo

if TYPE_CHECKING:
    from app.client import Flopwatch

ALL = "all"
Kind = Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only jobs of this kind; may be repeated.")]


@with_server
def pause(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Let no more jobs start; those that run go on."""
    paused = server.get("/queue/paused")["kinds"]
    if kind is None:
        paused = ALL
    elif paused != ALL:
        paused = sorted({*paused, *kind})
    _set(server, paused, as_json=as_json)


@with_server
def resume(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Let jobs start again after `flopwatch pause`."""
    from app.client import ClientError

    paused: list[str] | str = []
    if kind is not None:
        paused = server.get("/queue/paused")["kinds"]
        if paused == ALL:
            raise ClientError("All kinds are paused: `flopwatch resume` without --kind lets them go on.")
        paused = sorted(set(paused) - set(kind))
    _set(server, paused, as_json=as_json)


COMMANDS = (pause, resume)


def _set(server: Flopwatch, kinds: list[str] | str, *, as_json: bool) -> None:
    from app.cli.output import print_json

    answer: dict[str, Any] = server.send("PUT", "/queue/paused", body={"kinds": kinds}).json()
    if as_json:
        print_json(answer)
        return
    paused = answer["kinds"]
    named = "all kinds" if paused == ALL else ", ".join(paused)
    echo(f"paused: {named}" if paused else "nothing is paused")
