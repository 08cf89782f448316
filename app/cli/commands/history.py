"""The command that shows a metric of a case over time: history."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import arguments, completing
from app.cli.common import AsJson, command
from app.cli.terminal import echo

if TYPE_CHECKING:
    from flopwatch import Flopwatch

KEY = re.compile("[0-9a-f]{4,}")
"""A case's key, or its beginning."""


@command
def history(
    server: Flopwatch,
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE]", help="The case's key, or its beginning: case_key in JSON.")
    ] = None,
    *,
    job_id: Annotated[
        int | None,
        typer.Option(
            "--job", metavar="ID", help="A job that has measured the case.", autocompletion=completing.job_ids
        ),
    ] = None,
    coordinate: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME=VALUE", help="Select the job's case with this value; may be repeated."),
    ] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="By default the main one.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Only on this device.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Maximum number of points, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show one metric of one case over time: in every job that measured it, with the version of the code."""
    from app.cli.output import print_columns, print_json
    from app.metrics import readable
    from flopwatch.text.times import moment

    if case is None and job_id is None:
        raise typer.BadParameter("give a case's key, or --job")
    if case is not None and not KEY.fullmatch(case):
        raise typer.BadParameter(f"{case!r} is no case's key, hexadecimal digits: `--job ID` takes a job")
    chosen = [f"{name}={value}" for name, value in arguments.parse_pairs(coordinate or []).items()]
    shown = server.get(
        "/history", case=case, job=job_id, coordinate=chosen or None, metric=metric, device=device, limit=limit
    )
    if as_json:
        print_json(shown)
        return
    echo(f"{shown['kind']}: {shown['case']} (case {shown['case_key']})")
    several = len(shown["devices"]) > 1
    several_hosts = len(shown["hosts"]) > 1
    echo(readable(shown["metric"], shown["unit"]) + ("" if several else f" on {shown['devices'][0]}"))
    places = [*(["device"] if several else []), *(["host"] if several_hosts else [])]
    head = ("finished", "job", *places, "median", "low", "high", "n", "verdict", "version")
    rows = [
        (
            moment(point["finished_at"]),
            f"{point['job']} {point['side']}" if point["side"] else point["job"],
            *([point["device_key"]] if several else []),
            *([point["host"]] if several_hosts else []),
            point["outcome"] if point["value"] is None else point["value"],
            *(point[name] for name in ("low", "high", "n", "validity")),
            " ".join(filter(None, (point["short_version"], point.get("revision")))) or None,
            ", ".join(point["baselines"]) or None,
        )
        for point in reversed(shown["points"])
    ]
    print_columns((*head, "baselines"), rows)
    if shown["is_cut"]:
        echo(f"showing the newest {len(rows)}; use --limit for more", err=True)
    echo(f"{server.url}/ui/history?case={shown['case_key']}&metric={shown['metric']}")
