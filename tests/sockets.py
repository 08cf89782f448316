"""Which sockets listen: by their links below /proc, since a port may soon be another process's."""

from contextlib import suppress
from pathlib import Path

LISTENS = "0A"
"""The state of a socket in /proc/net/tcp that listens."""


def listening() -> set[str]:
    """Return the sockets that listen on this host."""
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, _, _, state, _, _, _, _, _, inode, *_ = row.split()
            if state == LISTENS:
                found.add(f"socket:[{inode}]")
    return found


def listening_of(*pids: int) -> set[str]:
    """Return those at which these processes listen."""
    links: set[str] = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                links.add(str(path.readlink()))
    return links & listening()
