"""Code that a user has uploaded, in a spec: `code: {sha256, function}`.

It is the one exception to "nothing is imported by a name from a request", and needs a worker whose operator has allowed
it. The spec names the file by its content, so that equal specs always mean equal code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from app.specs._base import Needs, StrictModel
from app.specs._identity import Scalar

FAMILY, NAME = "code", "uploaded"
RUNS_CODE = f"{FAMILY}:{NAME}"
"""The name that a worker started with --allow-code registers, and that jobs with uploaded code need."""
ALLOW_IT = "start one with `flopwatch worker --allow-code`"
LABEL_DIGITS = 8

Role = Literal["attention", "model", "step", "script"]
ROLE = "x-flopwatch-code"
"""Key in a spec's JSON Schema that gives the role of the code in a field; clients find the field by it."""


class CodeSpec(StrictModel):
    """A function or a class in an uploaded Python file (`PUT /files/{sha256}`)."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the file, in lower-case hexadecimal digits."""
    function: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name in the file."""

    def label(self) -> str:
        """Return the name that tables show: `attention@3f2a9c1b`. No registered name has an @ in it."""
        return f"{self.function}@{self.sha256[:LABEL_DIGITS]}"


class Uploaded(Needs):
    """Marks a field that takes uploaded code: `Annotated[CodeSpec | None, Uploaded("attention")]`."""

    def __init__(self, role: Role) -> None:
        super().__init__(FAMILY, NAME)
        self.role = role

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**super().__get_pydantic_json_schema__(schema, handler), ROLE: self.role}


def codes_of(spec: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the location and the SHA-256 of each uploaded file that a spec, given as JSON, names, also inside nested
    specs."""
    for field, value in spec.items():
        if isinstance(value, Mapping):
            if set(value) == set(CodeSpec.model_fields):
                yield (*at, field), str(value["sha256"])
            else:
                yield from codes_of(value, (*at, field))


def coordinates(identity: Mapping[str, Scalar], field: str, code: CodeSpec | None) -> dict[str, Scalar]:
    """Return a case's identity with the coordinates of a field of code, which are null if it has no effect."""
    kept = {name: value for name, value in identity.items() if name.partition(".")[0] != field}
    parts = dict.fromkeys(CodeSpec.model_fields) if code is None else code.model_dump()
    return {**kept, **{f"{field}.{name}": value for name, value in parts.items()}}


def names(field: str) -> tuple[str, ...]:
    """Return the names of the coordinates of a field of code."""
    return tuple(f"{field}.{name}" for name in CodeSpec.model_fields)
