"""The address of a server, which the server leaves in its data folder so that commands and clients on this host find
it.

Standard library only: the command line starts in milliseconds.
"""

import contextlib
import json
import os
from pathlib import Path

FILE = "server.json"


def leave(folder: Path, url: str) -> None:
    """Record that this process's server listens at `url`; a later server replaces the record."""
    partial = folder / f"{FILE}.{os.getpid()}"
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(folder / FILE)


def read(folder: Path) -> str | None:
    """Return the address that the last server of this folder left; None if there is none, or it cannot be read."""
    url = _record(folder).get("url")
    return url if isinstance(url, str) and url.startswith("http") else None


def remove(folder: Path) -> None:
    """Remove the address if it is this process's; another server may have left its own meanwhile."""
    if _record(folder).get("pid") == os.getpid():
        with contextlib.suppress(FileNotFoundError):
            (folder / FILE).unlink()


def _record(folder: Path) -> dict[str, object]:
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
