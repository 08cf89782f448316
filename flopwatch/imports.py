"""Finds the files of one's own that uploaded code imports: those that would not go along with it, and those whose names
a job's process has taken. Standard library only."""

import ast
import io
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

TAKEN = frozenset({
    "annotated_types", "flopwatch", "mpmath", "numpy", "psutil", "pydantic", "pydantic_core", "pynvml", "sympy",
    "torch", "torchgen", "triton", "typing_extensions", "typing_inspection",
})  # fmt: skip
"""Names of modules that a job's process has loaded before it runs code of others, beside the standard library's."""
PROJECTS = ("pyproject.toml", "setup.cfg", "setup.py")
"""A folder with one of these files can be installed."""


def left_behind(source: bytes, file: Path, here: Path) -> tuple[list[str], Path] | None:
    """Return the modules of one's own that a file imports, in functions, too, and that do not go along with the file
    alone, and the folder that has to; None if there are none.

    Imports within `if` do not count. Modules are looked for beside the file, then in the folders above it as far as
    `here`, the folder in which the command runs; those whose names others have, only where Python looks first.
    """
    nodes = list(_unconditional(ast.parse(source)))
    beside = file.resolve().parent
    if relative := [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]:
        names = [f"{'.' * node.level}{node.module or ''}" for node in relative]
        above = [beside, *beside.parents]
        return list(dict.fromkeys(names)), above[min(max(node.level for node in relative), len(above) - 1)]
    above = [each for each in beside.parents if each.is_relative_to(here.resolve())]
    imported = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    own = {name.partition(".")[0] for name in imported} - {file.stem}
    others = TAKEN | sys.stdlib_module_names
    for root in (beside, *above):
        found = {name for name in own - others if _is_module(root / name) or _is_module(root / "src" / name)}
        if root == beside:
            found |= {name for name in own & others if _is_regular(root / name)}
        if found:
            return sorted(found), root
    return None


def _is_module(path: Path) -> bool:
    return _is_regular(path) or (path.is_dir() and any(path.glob("*.py")))


def _is_regular(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _unconditional(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.If):
            yield from _unconditional(child)


def clash(file: str, names: Sequence[str], files: Sequence[str] = ()) -> str:
    """Return the sentence for modules of a folder whose names are taken by modules that a job loads before it."""
    return (
        f"{file} imports {', '.join(map(repr, names))} of its folder, and a job has loaded another module of that name "
        f"before any code of yours runs: rename {', '.join(files) or 'yours'}."
    )


def clash_in(packed: bytes, file: str) -> str | None:
    """Return that sentence before the upload: a file of a packed folder imports modules there whose names are TAKEN."""
    taken = sorted(_followed(_sources(packed), file)[0].keys() & TAKEN)
    return clash(file, taken) if taken else None


def own_modules(folder: Path, file: str) -> dict[str, str]:
    """Return the top-level modules of an unpacked folder that a file, and what it imports there, import anywhere, and
    where each is: beside the file, at the top ("."), or in the "src" of a project that can be installed."""
    return _followed(_unpacked(folder), file)[0]


def other_modules(folder: Path, file: str) -> set[str]:
    """Return the other top-level modules that they import, without those whose names others have."""
    own, files = _followed(sources := _unpacked(folder), file)
    imported = {
        module.partition(".")[0]
        for name in files
        for module in _imported(sources.get(name, b""), str(PurePosixPath(name).parent))
    }
    return imported - own.keys() - TAKEN - sys.stdlib_module_names


def _unpacked(folder: Path) -> dict[str, bytes]:
    sources = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
    return sources | {name: b"" for name in PROJECTS if (folder / name).is_file()}


def forgotten(packed: bytes, file: str, untracked: Mapping[str, bytes]) -> list[str]:
    """Return which untracked files, by their names in a packed folder, its file or what it imports would import."""
    return sorted(untracked.keys() & _followed({**_sources(packed), **untracked}, file)[1])


def _sources(packed: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith((".py", *PROJECTS))}


def _followed(sources: Mapping[str, bytes], file: str) -> tuple[dict[str, str], set[str]]:
    """Return the top-level modules of the folder that a file, and those files that it imports, import, and where they
    are; and all those files."""
    # As workers look for them. What is installed of a project is seldom the version that goes along.
    is_src = "src/__init__.py" not in sources and any(name in sources for name in PROJECTS)
    roots = dict.fromkeys([str(PurePosixPath(file).parent), ".", *(["src"] if is_src else [])])
    folders = {part for name in sources for part in map(str, PurePosixPath(name).parents)}
    own: dict[str, str] = {}
    seen, waiting = {file}, [file]
    while waiting:
        name = waiting.pop()
        for module in _imported(sources.get(name, b""), str(PurePosixPath(name).parent)):
            files, root = _files_of(module, roots, sources, folders)
            waiting += [each for each in files if each not in seen]
            seen.update(files)
            if root is not None:
                own.setdefault(module.partition(".")[0], root)
    return own, seen


def _files_of(
    module: str, roots: Iterable[str], sources: Mapping[str, bytes], folders: set[str]
) -> tuple[list[str], str | None]:
    """Return the files of the folder that an import of a module runs, and in which root its first part is, if any."""
    parts = module.split(".")
    for root in roots:
        places = [PurePosixPath(root, *parts[: count + 1]) for count in range(len(parts))]
        files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py") if f"{place}{end}" in sources]
        if files or str(places[0]) in folders:
            return files, root
    return [], None


def _imported(source: bytes, folder: str) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere, a relative one from the top of the uploaded folder.
    `from a import b` may import the module a.b, too."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # Python says where, when it imports the file
    for node in ast.walk(module):
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
