"""Gives every process that has this folder on its path one more job kind, `plain`: Python imports it at start.

Such processes can be sabotaged, and their clocks moved, as those of tests/plugins/sabotage. Warm parents in new
interpreters preload no torch: plain jobs need none.
"""

import runpy
import sys
from pathlib import Path

import second_folder

FOLDER = Path(__file__).resolve().parent

second_folder.add(FOLDER)
runpy.run_path(str(FOLDER.parent / "sabotage" / "sitecustomize.py"))

if "warm" in sys.orig_argv:
    from flopwatch.workers.processes import warm

    warm.PRELOADED = ()  # what `warm` itself imports suffices: some modules of runners import torch
