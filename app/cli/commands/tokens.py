"""Commands for access tokens: token create, token list, token revoke."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.common import AsJson, cli, with_server
from app.cli.terminal import echo

if TYPE_CHECKING:
    from flopwatch import Flopwatch

DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}

token = typer.Typer(no_args_is_help=True, help="Make, list and revoke access tokens, with an admin's token.")
cli.add_typer(token, name="token")


def _days(text: str) -> float | None:
    """Parse "12h", "90d" or "2w"; None for "never"."""
    if text == "never":
        return None
    span = re.fullmatch(r"([0-9]{1,5})([hdw])", text)
    if span is None:
        raise typer.BadParameter("write 12h, 90d, 2w or never")
    return int(span[1]) * DAYS[span[2]]


@token.command("create")
@with_server
def create(
    server: Flopwatch,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; its jobs show this name.")],
    *,
    scope: Annotated[
        str,
        typer.Option(help="read, submit, code (upload code; equals shell access) or admin; each includes the former."),
    ],
    expires: Annotated[str, typer.Option(metavar="SPAN", help="12h, 90d, 2w or never.")] = "90d",
    as_json: AsJson = False,
) -> None:
    """Make a token, and print it: nobody can read it again."""
    from app.cli.output import print_json

    made = server.ask("POST", "/tokens", body={"name": name, "scope": scope, "expires_days": _days(expires)})
    if as_json:
        print_json(made)
        return
    echo(made["token"])
    until = f"until {made['expires_at'][:10]}" if made["expires_at"] else "without end"
    echo(f"{made['name']} may {made['scope']}, {until}; `flopwatch token revoke {made['id']}` ends it", err=True)


@token.command("list")
@with_server
def list_(server: Flopwatch, *, as_json: AsJson = False) -> None:
    """List tokens, oldest first."""
    from app.cli.output import print_list
    from flopwatch.text.times import age, moment

    columns = {
        "id": "id",
        "name": "name",
        "scope": "scope",
        "made": lambda one: age(one["created_at"]),
        "expires": lambda one: moment(one["expires_at"]) or "never",
        "used": lambda one: age(one["last_used_at"]) or "never",
    }
    print_list(server.get("/tokens")["data"], columns, as_json=as_json)


@token.command("revoke")
@with_server
def revoke(
    server: Flopwatch,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id: fw_ID_… is the token.")],
) -> None:
    """Revoke a token; it ends at once."""
    from urllib.parse import quote

    server.send("DELETE", f"/tokens/{quote(token_id, safe='')}")
    echo(f"token {token_id} revoked")
