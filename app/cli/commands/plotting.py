"""The command `plot`: every plot of the pages as a file."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import completing
from app.cli.arguments import parse_pairs
from app.cli.commands.results import values_of, write_new
from app.cli.common import command
from app.cli.terminal import echo, echo_bytes

if TYPE_CHECKING:
    from flopwatch import Flopwatch
    from flopwatch.queries import PlotOptions

PlotFormat = enum.StrEnum("PlotFormat", {name: name for name in ("svg", "png", "pdf", "html", "json")})  # type: ignore[misc]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB] [NAME]",
        help="The job, and the plot's name; without a name, the names of all. With --sweep the name alone.",
        autocompletion=completing.job_ids,
    ),
]


@command
def plot(
    server: Flopwatch,
    words: Words = None,
    *,
    sweep: Annotated[
        int | None, typer.Option(metavar="ID", help="Instead of JOB.", autocompletion=completing.sweep_ids)
    ] = None,
    against: Annotated[
        int | None, typer.Option(metavar="ID", help="For ratios and distributions: the job to compare JOB with.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Of a chart, heat map or history: what is drawn.")] = None,
    x: Annotated[str | None, typer.Option(metavar="COORDINATE", help="Along x.")] = None,
    y: Annotated[str | None, typer.Option(metavar="COORDINATE", help="Of a heat map: its rows.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Coordinates that make the series; by default all that vary.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COORDINATE=VALUE", help="Only these cases; may be repeated.")
    ] = None,
    relative_to: Annotated[
        list[str] | None,
        typer.Option(metavar="COORDINATE=VALUE", help="Draw how many times faster each case is than this one."),
    ] = None,
    output_format: Annotated[
        PlotFormat | None, typer.Option("--format", help="By default what the file's name says, or svg.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", dir_okay=False, help="The file; `-`: standard output. By default named by job and plot."
        ),
    ] = None,
) -> None:
    """Write a plot of a job's or a sweep's page as a picture for a report; without NAME, list the plots of the job."""
    job, name = _job_and_name(words or [], sweep)
    if name is None and sweep is None:
        if output is not None or output_format is not None:
            raise typer.BadParameter("give a NAME; without one, the plots are only listed", param_hint="[JOB] [NAME]")
        _list(server, job)
        return
    name = name or "chart"
    written = output_format or _format_of(output)
    options: PlotOptions = {
        "metric": metric,
        "x": x,
        "y": y,
        "group": group and [group],
        "where": values_of(where),
        "relative_to": parse_pairs(relative_to or []) or None,
    }
    content = server.plot(job, name, sweep=sweep, against=against, format=written.value, **options)  # type: ignore[arg-type]
    if str(output) == "-":
        echo_bytes(content)
        return
    of = f"job-{job}" if sweep is None else f"sweep-{sweep}"
    target = output or Path(f"{of}-{name}.{written}")
    write_new(target, content)
    echo(f"{target}: {len(content)} bytes")


def _job_and_name(words: list[str], sweep: int | None) -> tuple[int | None, str | None]:
    """Return the job and the plot's name; of a sweep there is only a name."""
    rest = list(words)
    job = None
    if sweep is None:
        if not rest or not rest[0].isdecimal():
            raise typer.BadParameter("give the number of a JOB, or --sweep", param_hint="[JOB] [NAME]")
        job = int(rest.pop(0))
    if len(rest) > 1:
        raise typer.BadParameter("give one NAME", param_hint="[JOB] [NAME]")
    return job, rest[0] if rest else None


def _format_of(output: Path | None) -> PlotFormat:
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    if suffix and suffix not in list(PlotFormat):
        formats = ", ".join(PlotFormat)
        raise typer.BadParameter(
            f"{suffix} is no format of plots: name it by --format ({formats})", param_hint="--output"
        )
    return PlotFormat(suffix or "svg")


def _list(server: Flopwatch, job: int | None) -> None:
    from app.cli.output import print_columns

    plots = server.list_plots(job)
    if not plots:
        echo(f"job {job} has no plots", err=True)
        return
    print_columns(("plot", "title"), [(plot["name"], plot["title"]) for plot in plots])
