"""Gives every process that has this folder on its path one more job kind, `staged`: Python imports it at start."""

from __future__ import annotations

from pathlib import Path

import second_folder

second_folder.add(Path(__file__).resolve().parent)

import light_warm_parent  # noqa: E402, F401 - it imports both packages
