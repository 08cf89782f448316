"""`python -m app.cli` is `flopwatch`, also where the command is not on the path."""

from app.cli import main

main()
