"""Runs `flopwatch` as `python -m flopwatch`, also where the command is not on the path."""

from flopwatch.start import command

command()
