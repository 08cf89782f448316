"""Runs `flopwatch` as `python -m app.cli`, also where the command is not on the path."""

from app.cli import main as run

if __name__ == "__main__":
    run()
