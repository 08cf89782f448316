"""Packs the folder of a project for its upload. Equal contents give equal bytes, and so one SHA-256.

Standard library only. `workers.uploaded` unpacks it.
"""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
from pathlib import Path

DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file: the earliest that a zip file can hold."""
MODE = 0o100644 << 16


def pack(folder: Path, file: Path) -> bytes:
    """Pack a folder, with the file that is named in it as the archive's comment.

    These files go along: what git tracks, with changes that are not committed; without git, all files but hidden ones
    and __pycache__. Links do not.

    Raises:
        ValueError: the file is not in the folder, or git does not track it; a sentence for people.
        OSError: a file cannot be read.
    """
    root = folder.resolve()
    try:
        name = file.resolve().relative_to(root).as_posix()
    except ValueError:
        raise ValueError(f"{file} is not in the folder {folder}, which --code names") from None
    files = _tracked(root) or _visible(root)
    if name not in files:
        raise ValueError(f"{file} does not go along: git does not track it (git add {file}), or it is hidden or a link")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in files:
            entry = zipfile.ZipInfo(each, DATE)
            entry.create_system, entry.external_attr, entry.compress_type = 3, MODE, zipfile.ZIP_DEFLATED
            archive.writestr(entry, (root / each).read_bytes())
        archive.comment = name.encode()
    return packed.getvalue()


def _tracked(root: Path) -> list[str]:
    """Return the files that git tracks, sorted; none if the folder is in no repository or git is not there."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z"],
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(name for name in os.fsdecode(listed.stdout).split("\0") if name and _is_plain(root / name))


def _visible(root: Path) -> list[str]:
    found = []
    for at, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(at, name) for name in names if not name.startswith(".")]
    return sorted(path.relative_to(root).as_posix() for path in found if _is_plain(path))


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
