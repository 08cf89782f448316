"""Every command, put together."""

from __future__ import annotations

import typer

from app.cli import jobs, processes, queue, results

cli = typer.Typer(
    help="A profiling job queue for transformer training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (processes, jobs, queue, results):
    for command in module.COMMANDS:
        cli.command()(command)
