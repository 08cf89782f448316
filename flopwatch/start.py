"""Starts our programs: `python -P PATH/start.py workers agent`; and the command `flopwatch`.

By its path, so that neither the current folder nor another installation decides what runs. Processes that
multiprocessing spawns in a job run this file, too, without starting anything.
"""

import importlib
import os
import sys


def find_flopwatch() -> None:
    """Put the folder that has `flopwatch` alone first on `sys.path`, unless it is there."""
    home = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120
    beside = os.path.dirname(home)  # noqa: PTH120
    exposing = os.path.join(beside, "tools", "editable")  # noqa: PTH118
    folder = exposing if os.path.isdir(os.path.join(exposing, "flopwatch")) else beside  # noqa: PTH112, PTH118
    if folder not in sys.path:
        sys.path.insert(0, folder)


def run(program: str, *arguments: str) -> None:
    """Run one of our programs in this process, which imports nothing of ours by a short name."""
    from flopwatch import packages

    packages.hide()
    sys.argv[:] = ["flopwatch", *arguments]
    importlib.import_module(f"flopwatch.{program}.__main__").run()


def command() -> None:
    """Run `flopwatch`, the command."""
    run("app.cli", *sys.argv[1:])


if __name__ == "__main__":
    find_flopwatch()
    run(*sys.argv[1:])
