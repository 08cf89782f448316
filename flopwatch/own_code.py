"""The user's own code for a job, as users name it: `my_attention.py:attention`.

Standard library only: the client, the command line and `flopwatch run` share it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch import calls
from flopwatch.imports import forgotten
from flopwatch.packing import is_packed, pack, pack_revision, place, run_git

ROLE = "x-flopwatch-code"
"""Key in a spec's JSON Schema that gives the role of the code in a field, as `GET /specs` answers it."""
ROLES = {"implementation": ("attention", "kernel"), "model": ("model",), "step": ("step",), "script": ("script",)}
"""The roles of the code that each option names; a kind has one of them."""
GIT_TIMEOUT_S = 10.0
LINK, GITLINK = "120000", "160000"
"""Modes of a symbolic link and of a submodule in git."""
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAIN = "__main__"
"""In place of a function: the whole file, as a script."""


@dataclass(frozen=True)
class OwnCode:
    """A function or a class in a Python file of this host."""

    content: bytes
    """The file, or the packed folder that goes along with it."""
    function: str
    name: str
    """The file's name; its path in the folder that goes along."""
    revision: Mapping[str, Any] | None
    """Where it comes from, as a spec has it."""

    @classmethod
    def read(cls, named: str, folder: Path | None = None, label: str | None = None) -> OwnCode:
        """Read the file of "my_attention.py:attention"; with a folder, pack all of that for the upload. `label` is what
        its author calls this version. Raises ValueError with a sentence for people."""
        path, function = _parts(named)
        source = _content(path)
        _check(path, source, function)
        if folder is None:
            return cls(source, function, path.name, _revision(path.parent, path.name, label))
        try:
            packed = pack(folder, path)
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error
        name = place(folder, path)
        if files := forgotten(packed, name, _untracked(folder)):
            raise ValueError(f"{path} imports {', '.join(files)}, which git does not track: git add them")
        return cls(packed, function, name, _revision(folder, ".", label))

    @classmethod
    def of_version(cls, version: str, named: str, folder: Path | None = None) -> OwnCode:
        """Read a version of one's code: of the file, folder or git revision that `version` is.

        `named` is "my_attention.py:attention": in the folder, or from here in the revision. A `version` that is a file
        stands in for that file. `folder` goes along: that of the revision, or the one in the folder that `version` is.
        Raises ValueError with a sentence for people.
        """
        path, function = _parts(named)
        if Path(version).is_file():
            if folder is not None:
                raise ValueError(f"--code goes along with folders and revisions, and {version} is a file")
            return replace(cls.read(f"{version}:{function}", label=version), name=path.name)
        if Path(version).is_dir():
            if path.is_absolute() and not path.resolve().is_relative_to(Path(version).resolve()):
                raise ValueError(f"version {version} is a folder, and {path} an absolute path outside of it")
            inside = None if folder is None else Path(version, folder)
            return cls.read(f"{Path(version, path)}:{function}", inside, label=version)
        return cls._of_revision(version, path, function, folder)

    @classmethod
    def _of_revision(cls, version: str, path: Path, function: str, folder: Path | None) -> OwnCode:
        commit = _git(path.parent, "rev-parse", "--verify", "--quiet", f"{version}^{{commit}}")
        if commit is None:
            inside = _git(path.parent, "rev-parse", "--git-dir")
            why = "" if inside else ", which is in no git repository: name two files or folders"
            raise ValueError(f"{version!r} is no file, no folder, and no git revision of the folder of {path}{why}")
        revision = {"label": version, "commit": commit, "dirty": False}
        shown = run_git(path.parent, "show", f"{commit}:./{path.name}", timeout_s=GIT_TIMEOUT_S)
        if shown is None:
            raise ValueError(f"revision {version} has no {path}")
        _check(path, shown, function)
        if folder is None:
            return cls(shown, function, path.name, revision)
        name = place(folder, path)
        contents, links = _files_at(folder, commit)
        return cls(pack_revision(contents, links, folder, path), function, name, revision)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file, or of the packed folder."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def source(self) -> bytes:
        """Return the file, also from a packed folder."""
        if not is_packed(self.content):
            return self.content
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            return archive.read(self.name)

    def as_field(self) -> dict[str, Any]:
        """Return the value by which a spec names it."""
        field: dict[str, Any] = {"sha256": self.sha256, "function": self.function, "file": self.name}
        return field if self.revision is None else {**field, "revision": self.revision}


def _parts(named: str) -> tuple[Path, str]:
    file, colon, function = named.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise ValueError(f"{named!r} is not of the form FILE.py:NAME, with a name that the file defines")
    return Path(file), function


def _check(path: Path, source: bytes, function: str) -> None:
    """Raise ValueError, with a sentence for people, if a file is not Python or does not define the function."""
    try:
        module = ast.parse(source, str(path))
        compile(module, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{path}{line}: this is not Python: {reason}") from error
    defined = list(dict.fromkeys(_defined(module)))
    if function != MAIN and function not in defined and "*" not in defined:
        near = difflib.get_close_matches(function, defined, n=1)
        own = [node.name for node in module.body if isinstance(node, DEFINITION)]
        hint = f"did you mean {near[0]}?" if near else f"it defines: {', '.join(own) or 'no function and no class'}"
        raise ValueError(f"{path} defines no {function!r}; {hint}")


def _revision(folder: Path, name: str, label: str | None) -> dict[str, Any] | None:
    """Return label and commit of a file or folder in a checkout, and how it differs from the commit; without a commit
    if git tracks nothing of it, None if there is no label, either."""
    labelled = {} if label is None else {"label": label}
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files", "--", name):
        return labelled or None
    diff = _git(folder, "diff", "--shortstat", "HEAD", "--", name)
    return {**labelled, "commit": commit, "dirty": bool(diff), "diff": diff or None}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _files_at(folder: Path, commit: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return what a commit has in a folder, and in its submodules that are checked out: the contents of files, and the
    targets of links. Raises ValueError, a sentence for people, if git cannot read it."""
    archived = run_git(folder, "archive", "--format=zip", commit)
    listed = run_git(folder, "ls-tree", "-r", "-z", commit)
    if archived is None or listed is None:
        raise ValueError(f"git cannot read {folder} at commit {commit}")
    contents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    with zipfile.ZipFile(io.BytesIO(archived)) as archive:
        packed = set(archive.namelist())
        for entry in os.fsdecode(listed).split("\0")[:-1]:
            facts, _, name = entry.partition("\t")
            mode, _, number = facts.split()
            if mode == GITLINK:
                if (folder / name / ".git").exists():
                    inner, pointing = _files_at(folder / name, number)
                    contents |= {f"{name}/{each}": content for each, content in inner.items()}
                    links |= {f"{name}/{each}": target for each, target in pointing.items()}
                continue
            # An attribute (export-ignore) keeps files out of archives that a checkout has.
            content = archive.read(name) if name in packed else _blob(folder, number)
            if mode == LINK:
                links[name] = os.fsdecode(content)
            else:
                contents[name] = content
    return contents, links


def _untracked(folder: Path) -> dict[str, bytes]:
    """Return the Python files of a folder that git neither tracks nor ignores, unless it tracks none of it: then all
    files go along."""
    listed = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    names = [name for name in (listed or "").split("\0") if (folder / name).is_file()]
    return {name: (folder / name).read_bytes() for name in names} if _git(folder, "ls-files") else {}


def _blob(folder: Path, number: str) -> bytes:
    content = run_git(folder, "cat-file", "blob", number, timeout_s=GIT_TIMEOUT_S)
    if content is None:
        raise ValueError(f"git cannot read object {number} of {folder}")
    return content


def _git(folder: Path, *command: str) -> str | None:
    output = run_git(folder, *command, timeout_s=GIT_TIMEOUT_S)
    return None if output is None else output.decode(errors="replace").strip()


def _defined(scope: ast.AST) -> Iterator[str]:
    """Yield the names that a module's own statements bind, also inside if, try, with and loops; "*" for a star
    import, whose names only running it would tell."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, DEFINITION):
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
    swept: Iterable[str] = (),
) -> list[OwnCode]:
    """Set the fields of a spec that take the user's own code; returns the files to upload.

    Args:
        spec: changed in place. In a kind that contains specs, its step or its candidate gets the code. A step goes to
            the baseline, too, unless that has one: a step of ours would do other work.
        specs: the answer to `GET /specs`.
        named: the file and its function by option ("implementation", "model", "step", "script"); None: not given.
        folder: the folder that goes along, with everything that the file imports.
        version: read this version of the files; see `OwnCode.of_version`. None: as they are.
        swept: dotted paths of fields that a sweep varies.

    Raises:
        ValueError: the file cannot be read, a job could not call what is named in it, or specs of this kind take no
            such code.
    """
    if folder is not None and not any(named.values()):
        raise ValueError("--code goes along with --step, --model, --implementation or a script: name one in the folder")
    schemas = {spec["kind"]: spec["schema"] for spec in specs}
    files: list[OwnCode] = []
    for option, roles in ROLES.items():
        value = named.get(option)
        if value is None:
            continue
        code = None
        for prefix, inside in _with_code(spec, option).items():
            kind = inside.get("kind")
            if kind not in schemas:
                return files  # the server says what is wrong with the kind
            of_kind = schemas[kind]["properties"].items()
            field = next((name for name, schema in of_kind if schema.get(ROLE) in roles), None)
            if field is None:
                able = [
                    known
                    for known, schema in schemas.items()
                    if any(part.get(ROLE) in roles for part in schema["properties"].values())
                ]
                more = f"; for where its time goes, `flopwatch why {value}`" if option == "step" else ""
                if more and kind == "estimate":
                    fits = f"flopwatch sweep memory --step {value} --fit arguments.NAME=UPTO"
                    more = f"; for what it needs, `flopwatch submit memory --step {value}`; for what fits, `{fits}`"
                raise ValueError(f"kind {kind} takes no {option} of your own; kinds that do: {', '.join(able)}{more}")
            if code is None:
                code = OwnCode.read(value, folder) if version is None else OwnCode.of_version(version, value, folder)
                files.append(code)
            if why := calls.complaint(code.source, code.function, option, _arguments(inside, prefix, swept)):
                raise ValueError(f"--{option} {value}: {why}")
            inside[field] = code.as_field()
    return files


def _with_code(spec: dict[str, Any], option: str) -> dict[str, dict[str, Any]]:
    """Return the specs that get an option's code, by the beginning of their fields' dotted paths."""
    if isinstance(spec.get("candidate"), dict):
        baseline = spec.get("baseline")
        both = option == "step" and isinstance(baseline, dict) and baseline.get("step_code") is None
        return {f"{side}.": spec[side] for side in (("baseline", "candidate") if both else ("candidate",))}
    if isinstance(spec.get("step"), dict):
        return {"step.": spec["step"]}
    return {"": spec}


def _arguments(spec: Mapping[str, Any], prefix: str, swept: Iterable[str]) -> list[str] | None:
    """Return the names of the arguments of a step, of the spec and of a sweep over it; None if nobody knows them."""
    given, paths = spec.get("arguments", {}), [path.removeprefix(prefix) for path in swept]
    if not isinstance(given, Mapping) or "arguments" in paths:
        return None
    return [*given, *(path.partition(".")[2] for path in paths if path.startswith("arguments."))]
