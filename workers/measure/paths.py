"""Takes the host's folders out of texts that others read: traces, stacks and snapshots."""

import os
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path

CHECKOUT = str(Path(__file__).parents[2])
PACKAGES = b"-packages/"
"""End of the names of folders with installed packages."""
BEGIN = rb"/(?<![\w./~\x80-\xff-]/)"
"""A slash that is not within a name, a relative path or an address of the web."""
VERSION = rb"(?:[0-9a-f]{64}|[0-9a-f]{8})"
"""The folder of a file, or of a folder, of uploaded code: its hash (workers/uploaded.py)."""
FOLDERS = rb"(?:[^/\s\"'\\<>|:,;()\[\]]+/)+"


def without_folders(text: str) -> str:
    """Return a text whose absolute paths are relative to Flopwatch, to an entry of `sys.path` or to the folder of
    installed packages, and uploaded code has its author's names; of any other file only the name remains."""
    return bytes_without_folders(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")


def bytes_without_folders(text: bytes) -> bytes:
    """Do the same for text in UTF-8."""
    return _pattern(tuple(sys.path)).sub(_shortened, text)


def _shortened(match: re.Match[bytes]) -> bytes:
    if match["root"] is not None:
        return b""
    _, packages, inside = match[0].rpartition(PACKAGES)
    return inside if packages else b""


@cache
def _pattern(entries: tuple[str, ...]) -> re.Pattern[bytes]:
    folders = {CHECKOUT, *entries, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))}
    roots = {folder.strip("/") for folder in folders if Path(folder).is_absolute()} - {""}
    known = b"|".join(re.escape(os.fsencode(root)) for root in sorted(roots, key=len, reverse=True))
    return re.compile(BEGIN + b"(?:(?P<root>(?:" + known + b")/(?:" + VERSION + b"/)?)|" + FOLDERS + b")")
