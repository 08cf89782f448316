"""Runs `flopwatch` as `python -m app.cli`, also where the command is not on the path."""

from app.cli import main

main()
