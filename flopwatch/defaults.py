"""Where a server keeps its data and listens unless its settings say otherwise, and how clients name their user to it.
Standard library only: clients read this, too.
"""

from __future__ import annotations

from pathlib import Path

HOST = "127.0.0.1"
PORT = 8000
USER = "Flopwatch-User"
"""The request header with the name of the user, percent-encoded UTF-8."""


def data_dir() -> Path:
    """Return the data folder of this user."""
    return Path.home() / ".local" / "share" / "flopwatch"
