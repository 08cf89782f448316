"""The `flopwatch` command. Modules here import slow modules inside their functions, so that --help is quick."""


def main() -> None:
    """Entry point of the command."""
    from app.cli.commands import cli

    cli()
