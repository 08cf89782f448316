"""Commands that pause the queue, and tell who uses it: pause, resume, usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import completing
from app.cli.common import AsJson, command
from app.cli.terminal import echo

if TYPE_CHECKING:
    from flopwatch import Flopwatch

ALL = "all"
USED = ("user", "kind", "device", "attempts", "device_hours")
STANDING = ("user", "running_devices", "queued_jobs", "recent_device_hours")
Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Only jobs of this kind; may be repeated.", autocompletion=completing.kinds),
]


@command
def pause(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Stop further jobs from starting; running ones continue."""
    paused = server.paused_kinds()
    if kind is None:
        paused = ALL
    elif paused != ALL:
        paused = sorted({*paused, *kind})
    _set(server, paused, as_json=as_json)


@command
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


@command
def usage(
    server: Flopwatch,
    *,
    since: Annotated[str, typer.Option(metavar="WHEN", help="30d, 12h, 2026-03-01, or a time.")] = "30d",
    as_json: AsJson = False,
) -> None:
    """Show device hours by user, kind and device, and who has running or queued jobs now."""
    from app.cli.output import print_columns, print_json

    answer = server.usage(since)
    if as_json:
        print_json(answer)
        return
    print_columns(_heads(USED), [[row[name] for name in USED] for row in answer["data"]])
    if answer["now"]:
        echo()
        print_columns(_heads(STANDING), [[row[name] for name in STANDING] for row in answer["now"]])
        if any(row["recent_device_hours"] is not None for row in answer["now"]):
            echo("the user with the least recent device hours is next, among jobs of equal priority")


def _heads(columns: Sequence[str]) -> list[str]:
    return [name.replace("_", " ") for name in columns]


def _set(server: Flopwatch, kinds: list[str] | str, *, as_json: bool) -> None:
    from app.cli.output import print_json

    answer = server.set_paused_kinds(kinds)
    if as_json:
        print_json(answer)
        return
    paused = answer["kinds"]
    named = "all kinds" if paused == ALL else ", ".join(paused)
    echo(f"paused: {named}" if paused else "nothing is paused any more")
