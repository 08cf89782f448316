"""The user's own code for a job, as users name it: `my_attention.py:attention`.

Standard library only: the client, the command line and `flopwatch run` share it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.packing import pack

ROLE = "x-flopwatch-code"
"""Key in a spec's JSON Schema that gives the role of the code in a field, as `GET /specs` answers it."""
OPTIONS = {"attention": "implementation", "model": "model", "step": "step", "script": "script"}
"""The option that names the code of each role."""
MAIN = "__main__"
"""In place of a function: the whole file, as a script."""


@dataclass(frozen=True)
class OwnCode:
    """A function or a class in a Python file of this host."""

    path: Path
    content: bytes
    function: str

    @classmethod
    def read(cls, named: str, folder: Path | None = None) -> OwnCode:
        """Read the file of "my_attention.py:attention"; with a folder, pack all of that for the upload. Raises
        ValueError with a sentence for people."""
        file, colon, function = named.rpartition(":")
        if not colon or not file or not function.isidentifier():
            raise ValueError(f"{named!r} is not of the form FILE.py:NAME, with a name that the file defines")
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
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
        if folder is not None:
            try:
                content = pack(folder, Path(file))
            except OSError as error:
                raise ValueError(f"{error.filename}: {error.strerror}") from error
        return cls(Path(file), content, function)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file, or of the packed folder."""
        return hashlib.sha256(self.content).hexdigest()

    def as_field(self) -> dict[str, str]:
        """Return the value by which a spec names it."""
        return {"sha256": self.sha256, "function": self.function}


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
) -> list[OwnCode]:
    """Set the fields of a spec that take the user's own code; returns the files to upload.

    Args:
        spec: changed in place. In a kind that contains specs, the candidate gets the code.
        specs: the answer to `GET /specs`.
        named: the file and its function by option ("implementation", "model", "step", "script"); None: not given.
        folder: the folder that goes along, with everything that the file imports.

    Raises:
        ValueError: the file cannot be read, or specs of this kind take no such code.
    """
    if folder is not None and not any(named.values()):
        raise ValueError("--code goes along with --step, --model, --implementation or a script: name one in the folder")
    schemas = {spec["kind"]: spec["schema"] for spec in specs}
    files: list[OwnCode] = []
    for role, option in OPTIONS.items():
        value = named.get(option)
        if value is None:
            continue
        inside = spec["candidate"] if isinstance(spec.get("candidate"), dict) else spec
        kind = inside.get("kind")
        if kind not in schemas:
            return files  # the server says what is wrong with the kind
        field = next((name for name, schema in schemas[kind]["properties"].items() if schema.get(ROLE) == role), None)
        if field is None:
            able = [known for known, schema in schemas.items() if _takes(schema, role)]
            raise ValueError(f"kind {kind} takes no {role} of your own; kinds that do: {', '.join(able)}")
        code = OwnCode.read(value, folder)
        inside[field] = code.as_field()
        files.append(code)
    return files


def _takes(schema: Mapping[str, Any], role: str) -> bool:
    return any(field.get(ROLE) == role for field in schema["properties"].values())
