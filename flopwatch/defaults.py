"""Where a server keeps its data and listens unless its settings say otherwise, and the headers between clients and it.
Standard library only: clients read this, too."""

from pathlib import Path

HOST = "127.0.0.1"
PORT = 8000
USER = "Flopwatch-User"
"""The request header with the name of the user, percent-encoded UTF-8."""
TIME = "Flopwatch-Time"
"""The header of answers with the time by the database's clock, RFC 3339."""


def data_dir() -> Path:
    """Return the data folder of this user."""
    return Path.home() / ".local" / "share" / "flopwatch"
