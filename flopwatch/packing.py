"""Packs the folder of a project for its upload. Equal contents give equal bytes, and so one SHA-256.

Standard library only. `workers.uploaded` unpacks it; the file that is meant is the archive's comment.
"""

import contextlib
import io
import os
import posixpath
import subprocess
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file: the earliest that a zip file can hold."""
MODE = 0o100644 << 16
MAX_FILES, MAX_BYTES = 10_000, 64 << 20
"""Most files of a folder, and their most bytes before they are packed; workers unpack no more."""
MAX_NAME_BYTES, MAX_DEPTH = 255, 64
"""Most bytes of a file's or folder's name, as Linux has it, and most folders inside each other."""


def pack(folder: Path, file: Path) -> bytes:
    """Pack a folder, with the file that is named in it as the archive's comment.

    These files go along: what git tracks, also in submodules, with changes that are not committed; without git, all
    files but hidden ones and __pycache__. For a link goes what it points to, if that is among them.

    Raises:
        ValueError: the file is not in the folder, or git does not track it, or the folder is too large; a sentence for
            people.
        OSError: a file cannot be read.
    """
    root = folder.resolve()
    if not root.is_dir():
        raise ValueError(f"--code {folder}: there is no such folder")
    name = place(folder, file)
    listed = _tracked(root) or _visible(root)
    links = {each: str((root / each).readlink()) for each in listed if (root / each).is_symlink()}
    files = _with_links((each for each in listed if each not in links), links)
    if name not in files:
        raise ValueError(f"{file} does not go along: git does not track it (git add {file}), or it is hidden or a link")
    _check_sizes(folder, {each: (root / source).stat().st_size for each, source in files.items()})
    return _packed(((each, (root / source).read_bytes()) for each, source in files.items()), name)


def is_packed(content: bytes) -> bool:
    """Return True for a packed folder, False for a file."""
    return content.startswith(b"PK\x03\x04")


def check_name(name: str) -> None:
    """Raise ValueError, a sentence for people, if a packed file has a name that cannot be unpacked, or only outside of
    the folder."""
    shown = f"{name[:80]!r}…" if len(name) > 80 else repr(name)
    parts = PurePosixPath(name).parts
    is_inside = parts and not name.endswith("/") and not name.startswith("/") and ".." not in parts and "\\" not in name
    if not is_inside or len(parts) > MAX_DEPTH or max(len(os.fsencode(part)) for part in parts) > MAX_NAME_BYTES:
        raise ValueError(f"the folder of code has a file that cannot be unpacked inside of it: {shown}")


def check_packed(content: bytes) -> None:
    """Raise ValueError as check_name does for the files of a packed folder; its worker finds out if it is whole."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            check_name(name)


def pack_revision(contents: Mapping[str, bytes], links: Mapping[str, str], folder: Path, file: Path) -> bytes:
    """Pack the files and links that a folder has at a revision, with bytes as `pack` gives of the same files.

    Raises ValueError: the file is not in it, or the folder is too large; a sentence for people.
    """
    name = place(folder, file)
    files = _with_links(contents, links)
    if name not in files:
        raise ValueError(f"there is no {file}")
    _check_sizes(folder, {each: len(contents[source]) for each, source in files.items()})
    return _packed(((each, contents[source]) for each, source in files.items()), name)


def _with_links(files: Iterable[str], links: Mapping[str, str]) -> dict[str, str]:
    """Return of each name that goes along, sorted, the file whose content it has: links have those of their targets,
    which may be folders."""
    found = {name: name for name in files}
    for link in links:
        to, followed = link, set[str]()
        while to in links and to not in followed:  # a link may point to another
            followed.add(to)
            to = posixpath.normpath(posixpath.join(posixpath.dirname(to), links[to]))
        found |= {link + name[len(to) :]: found[name] for name in found if f"{name}/".startswith(f"{to}/")}
    return dict(sorted(found.items()))


def place(folder: Path, file: Path) -> str:
    """Return the name of a file in a folder; raises ValueError if it is outside."""
    try:
        return file.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        raise ValueError(f"{file} is not in the folder {folder}, which --code names") from None


def _check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    if len(sizes) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"--code {folder}: {len(sizes)} files of {sum(sizes.values()) >> 20} MiB would be uploaded, and at most "
            f"{MAX_FILES} of {MAX_BYTES >> 20} MiB can; the largest is {largest}, of {sizes[largest] >> 20} MiB. Of "
            "a git repository only tracked files are uploaded"
        )


def _packed(files: Iterable[tuple[str, bytes]], file: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system, entry.external_attr, entry.compress_type = 3, MODE, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
        archive.comment = file.encode()
    return packed.getvalue()


def _tracked(root: Path) -> list[str]:
    """Return the files that git tracks; none if the folder is in no repository or git is not there."""
    listed = run_git(root, "ls-files", "-z", "--recurse-submodules") or b""
    return [name for name in os.fsdecode(listed).split("\0") if name and _is_there(root / name)]


def run_git(folder: Path, *command: str, timeout_s: float | None = None) -> bytes | None:
    """Return what git prints in a folder; None if it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, check=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _visible(root: Path) -> list[str]:
    found = []
    for at, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        # Links to folders are among the folders, and are not walked.
        found += [Path(at, name) for name in (*names, *folders) if not name.startswith(".")]
    return [path.relative_to(root).as_posix() for path in found if _is_there(path)]


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.is_file()
