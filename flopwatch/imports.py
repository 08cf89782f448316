"""Finds the modules that uploaded code imports at once, so that a worker without them is noticed before the upload.

Only imports that always run count: those of the module's own statements, not in functions, `if` or `try`, which may
know what to do without. Files of the folder that goes along are followed, not listed. Standard library only.
"""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from flopwatch.packing import is_packed


def complaint_about(workers: Sequence[Mapping[str, Any]], file: str, *, is_folder: bool) -> str | None:
    """Return a sentence for people if none of these workers, as `GET /workers/lacking` has them, has all that a file
    imports; None if one does, or if there are no workers, whose modules nobody knows."""
    if not workers or not all(worker["lacking"] for worker in workers):
        return None
    nearest = min(workers, key=lambda worker: len(worker["lacking"]))
    names = ", ".join(map(repr, nearest["lacking"]))
    others = "" if len(workers) == 1 else ", and no other worker has all that it needs"
    own = "put it into the folder that goes along" if is_folder else "send its folder along with --code FOLDER"
    return (
        f"{file} imports {names}, which the worker {nearest['id']} on {nearest['hostname']} lacks{others}: install it "
        f"for that worker and start the worker again; or if it is yours, {own}; or import it where it is needed, in a "
        "function or within try, and the job decides."
    )


def modules_of(content: bytes, file: str) -> list[str]:
    """Return the top-level modules that a file needs from its worker, sorted.

    Args:
        content: the file, or the packed folder that goes along with it (packing.py).
        file: the file's name in the folder.
    """
    if not is_packed(content):
        return sorted({name.partition(".")[0] for name in _imported(content, "")})
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        sources = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    return sorted(_needed(sources, file))


def _needed(sources: Mapping[str, bytes], file: str) -> set[str]:
    """Return the modules that a file and those files that it imports need from elsewhere."""
    beside = str(PurePosixPath(file).parent)
    folders = {part for name in sources for part in map(str, PurePosixPath(name).parents)}
    needed: set[str] = set()
    seen, waiting = {file}, [file]
    while waiting:
        name = waiting.pop()
        for module in _imported(sources.get(name, b""), str(PurePosixPath(name).parent)):
            files, is_here = _files_of(module, beside, sources, folders)
            waiting += [each for each in files if each not in seen]
            seen.update(files)
            if not is_here:
                needed.add(module.partition(".")[0])
    return needed


def _files_of(module: str, beside: str, sources: Mapping[str, bytes], folders: set[str]) -> tuple[list[str], bool]:
    """Return the files of the folder that an import of a module runs, and whether its first part is in the folder: as
    workers look for it, beside the file that is meant, then at the top."""
    parts = module.split(".")
    for root in dict.fromkeys([beside, "."]):
        places = [PurePosixPath(root, *parts[: count + 1]) for count in range(len(parts))]
        files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py") if f"{place}{end}" in sources]
        if files or str(places[0]) in folders:
            return files, True
    return [], False


def _imported(source: bytes, folder: str) -> Iterator[str]:
    """Yield the dotted names that a module's own statements import; of a relative import, the name from the top of the
    uploaded folder. `from a import b` may import the module a.b, too."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return  # Python says where, when it imports the file
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, folder)
            if base is not None:
                yield from (f"{base}.{name.name}" for name in node.names)


def _base(node: ast.ImportFrom, folder: str) -> str | None:
    """Return the dotted name that an import is from; None for a relative one that leaves the folder."""
    if not node.level:
        return node.module
    parts = [part for part in PurePosixPath(folder).parts if part != "."]
    kept = parts[: len(parts) - node.level + 1]
    names = [*kept, *([node.module] if node.module else [])]
    return ".".join(names) if node.level <= len(parts) and names else None
