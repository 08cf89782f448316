"""Gives every process that has this folder on its path one more job kind, `hostile`: Python imports it at start.

Such processes can be sabotaged, and their clocks moved, as those of tests/plugins/sabotage; a worker's schema of
specs can have another number ($SCHEMA_NUMBER). Their warm parents preload nothing: hostile jobs need no torch, and many
workers start.
"""

import os
import runpy
import sys
from pathlib import Path

import second_folder

FOLDER = Path(__file__).resolve().parent

second_folder.add(FOLDER)
runpy.run_path(str(FOLDER.parent / "sabotage" / "sitecustomize.py"))

if "warm" in sys.orig_argv:
    from workers.processes import warm

    warm.PRELOADED = ()

if (number := os.environ.get("SCHEMA_NUMBER")) and "agent" in sys.orig_argv:
    from flopwatch.app.specs import _schema

    _schema.SCHEMA = int(number)
