"""Where a server keeps its data and listens unless its settings say otherwise. Standard library only: clients look
there, too.
"""

from __future__ import annotations

from pathlib import Path

HOST = "127.0.0.1"
PORT = 8000


def data_dir() -> Path:
    """Return the data folder of this user."""
    return Path.home() / ".local" / "share" / "flopwatch"
