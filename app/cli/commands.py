"""Every command, put together."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from app.cli import comparing, doctor, history, jobs, plotting, processes, queue, results, site, tokens
from app.cli.common import Commands, DataDir, FieldsCommand, Url, before_command
from app.cli.terminal import echo

cli = typer.Typer(
    cls=Commands,
    help="A profiling job queue for transformer training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (processes, jobs, queue, results, plotting, comparing, history, site, doctor):
    for command in module.COMMANDS:
        takes_fields = "fields" in inspect.signature(command).parameters
        cli.command(cls=FieldsCommand if takes_fields else None)(command)
cli.add_typer(comparing.baseline, name="baseline")
cli.add_typer(tokens.token, name="token")


def _print_version(wanted: bool) -> None:
    if wanted:
        from flopwatch.version import own_version

        echo(f"flopwatch {own_version()}")
        raise typer.Exit


@cli.callback()
def options(
    *,
    url: Url = None,
    data_dir: DataDir = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and exit.")
    ] = False,
) -> None:
    """A profiling job queue for transformer training."""
    before_command.set({"url": url, "data_dir": data_dir})
