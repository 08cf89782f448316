"""The `flopwatch` command. Modules here import slow modules inside their functions, so that --help is quick."""

import sys


def main() -> None:
    """Entry point of the command."""
    from app.cli.commands import cli

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # of this process
    cli()
