"""The user's own code for a job, as users name it: `my_attention.py:attention`.

Standard library only: the client, the command line and `flopwatch run` share it.
"""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.packing import pack

ROLE = "x-flopwatch-code"
"""Key in a spec's JSON Schema that gives the role of the code in a field, as `GET /specs` answers it."""
ROLES = {"implementation": ("attention", "kernel"), "model": ("model",), "step": ("step",), "script": ("script",)}
"""The roles of the code that each option names; a kind has one of them."""
GIT_TIMEOUT_S = 10.0
MAIN = "__main__"
"""In place of a function: the whole file, as a script."""


@dataclass(frozen=True)
class OwnCode:
    """A function or a class in a Python file of this host."""

    path: Path
    content: bytes
    function: str
    name: str
    """The file's name; its path in the folder that goes along."""
    revision: Mapping[str, Any] | None = None
    """Where it comes from, as a spec has it; None: ask git."""

    @classmethod
    def read(cls, named: str, folder: Path | None = None) -> OwnCode:
        """Read the file of "my_attention.py:attention"; with a folder, pack all of that for the upload. Raises
        ValueError with a sentence for people."""
        file, colon, function = named.rpartition(":")
        if not colon or not file or not function.isidentifier():
            raise ValueError(f"{named!r} is not of the form FILE.py:NAME, with a name that the file defines")
        path = Path(file)
        return cls._checked(path, _content(path), function, folder)

    @classmethod
    def of_version(cls, version: str, named: str, folder: Path | None = None) -> OwnCode:
        """Read a version of one's code: of the file, folder or git revision that `version` is.

        `named` is "my_attention.py:attention": in the folder, or from here in the revision. Where `version` is a file
        itself, only the name behind the colon counts. `folder` goes along: that of the revision, or the folder that
        `version` is. Raises ValueError with a sentence for people.
        """
        file, _, function = named.rpartition(":")
        if Path(version).is_file():
            code = cls.read(f"{version}:{function}")
        elif Path(version).is_dir():
            code = cls.read(f"{Path(version, file)}:{function}", None if folder is None else Path(version, folder))
        else:
            return cls._of_revision(version, Path(file), function, folder)
        return replace(code, revision={"label": version, **(revision_of(code.path) or {})})

    @classmethod
    def _of_revision(cls, version: str, path: Path, function: str, folder: Path | None) -> OwnCode:
        commit = _git(path, "rev-parse", "--verify", "--quiet", f"{version}^{{commit}}")
        if commit is None:
            raise ValueError(f"{version!r} is no file, no folder, and no git revision of the folder of {path}")
        revision = {"label": version, "commit": commit, "dirty": False}
        if folder is None:
            shown = _run_git(path, "show", f"{commit}:./{path.name}")
            if shown is None or shown.returncode:
                raise ValueError(f"revision {version} has no {path}")
            return cls._checked(path, shown.stdout, function, None, revision)
        archived = _run_git(folder / "_", "archive", "--format=zip", commit)
        if archived is None or archived.returncode:
            raise ValueError(f"revision {version} has no folder {folder}")
        with tempfile.TemporaryDirectory() as there, zipfile.ZipFile(io.BytesIO(archived.stdout)) as archive:
            archive.extractall(there)
            file = Path(there) / path.resolve().relative_to(folder.resolve())
            return cls._checked(file, _content(file), function, Path(there), revision)

    @classmethod
    def _checked(
        cls,
        path: Path,
        content: bytes,
        function: str,
        folder: Path | None,
        revision: Mapping[str, Any] | None = None,
    ) -> OwnCode:
        file = str(path)
        try:
            module = ast.parse(content, file)
            compile(module, file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"{file}{line}: this is not Python: {reason}") from error
        defined = list(dict.fromkeys(_defined(module)))
        if function != MAIN and function not in defined and "*" not in defined:
            raise ValueError(f"{file} defines no {function!r}; it defines: {', '.join(defined) or 'nothing'}")
        name = path.name
        if folder is not None:
            try:
                content = pack(folder, path)
            except OSError as error:
                raise ValueError(f"{error.filename}: {error.strerror}") from error
            name = path.resolve().relative_to(folder.resolve()).as_posix()
        return cls(path, content, function, name, revision)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file, or of the packed folder."""
        return hashlib.sha256(self.content).hexdigest()

    def as_field(self) -> dict[str, Any]:
        """Return the value by which a spec names it."""
        field: dict[str, Any] = {"sha256": self.sha256, "function": self.function, "file": self.name}
        revision = self.revision or revision_of(self.path)
        return field if revision is None else {**field, "revision": revision}


def revision_of(path: Path) -> dict[str, Any] | None:
    """Return the commit of a file's checkout and how the file differs from it; None if git knows nothing of it."""
    commit = _git(path, "rev-parse", "HEAD")
    if commit is None:
        return None
    name = path.name
    dirty = bool(_git(path, "status", "--porcelain", "--", name))
    diff = _git(path, "diff", "--shortstat", "HEAD", "--", name) if dirty else None
    return {"commit": commit, "dirty": dirty, "diff": diff or None}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _git(path: Path, *command: str) -> str | None:
    """Return what git says in a file's folder; None if it fails, or is not installed."""
    done = _run_git(path, *command)
    return None if done is None or done.returncode else done.stdout.decode(errors="replace").strip()


def _run_git(path: Path, *command: str) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(["git", "-C", str(path.parent), *command], capture_output=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _defined(scope: ast.AST) -> Iterator[str]:
    """Yield the names that a module's own statements bind, also inside if, try, with and loops; "*" for a star
    import, whose names only running it would tell."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, ast.Lambda):
            yield from _defined(node)


def put_into(
    spec: dict[str, Any],
    specs: Iterable[Mapping[str, Any]],
    named: Mapping[str, str | None],
    folder: Path | None = None,
    version: str | None = None,
) -> list[OwnCode]:
    """Set the fields of a spec that take the user's own code; returns the files to upload.

    Args:
        spec: changed in place. In a kind that contains specs, the candidate gets the code.
        specs: the answer to `GET /specs`.
        named: the file and its function by option ("implementation", "model", "step", "script"); None: not given.
        folder: the folder that goes along, with everything that the file imports.
        version: read this version of the files; see `OwnCode.of_version`. None: as they are.

    Raises:
        ValueError: the file cannot be read, or specs of this kind take no such code.
    """
    if folder is not None and not any(named.values()):
        raise ValueError("--code goes along with --step, --model, --implementation or a script: name one in the folder")
    schemas = {spec["kind"]: spec["schema"] for spec in specs}
    files: list[OwnCode] = []
    for option, roles in ROLES.items():
        value = named.get(option)
        if value is None:
            continue
        inside = spec["candidate"] if isinstance(spec.get("candidate"), dict) else spec
        kind = inside.get("kind")
        if kind not in schemas:
            return files  # the server says what is wrong with the kind
        field = next((name for name, schema in schemas[kind]["properties"].items() if schema.get(ROLE) in roles), None)
        if field is None:
            able = [known for known, schema in schemas.items() if _takes(schema, roles)]
            raise ValueError(f"kind {kind} takes no {option} of your own; kinds that do: {', '.join(able)}")
        code = OwnCode.read(value, folder) if version is None else OwnCode.of_version(version, value, folder)
        inside[field] = code.as_field()
        files.append(code)
    return files


def _takes(schema: Mapping[str, Any], roles: Sequence[str]) -> bool:
    return any(field.get(ROLE) in roles for field in schema["properties"].values())
