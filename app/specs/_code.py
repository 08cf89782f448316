"""Code that a user has uploaded, in a spec: `code: {sha256, function}`.

It is the one exception to "nothing is imported by a name from a request", and needs a worker whose operator has allowed
it. The spec names the file by its content, so that equal specs always mean equal code.

The content is a version of the case, not a part of it: the case has the names of the file and of the function, so that
results of an edited file meet those of the file before.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from app.specs._base import Needs, SpecBase, StrictModel, check_lists, field_error, listed
from app.specs._identity import Scalar

FAMILY, NAME = "code", "uploaded"
RUNS_CODE = f"{FAMILY}:{NAME}"
"""The name that a worker started with --allow-code registers, and that jobs with uploaded code need."""
ALLOW_IT = "start `flopwatch up`, or `flopwatch worker`, with --allow-code"
UNNAMED = "uploaded"
"""Stands for the name of a file that the spec does not name."""

ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Argument = bool | int | float | Annotated[str, Field(max_length=1000)]
Arguments = Annotated[dict[ArgumentName, Argument], Field(max_length=50)]
"""Arguments of a function in uploaded code, by name."""

Role = Literal["attention", "kernel", "model", "step", "script"]
ROLE = "x-flopwatch-code"
"""Key in a spec's JSON Schema that gives the role of the code in a field; clients find the field by it."""


class Revision(StrictModel):
    """Where uploaded code comes from, for people: it changes nothing."""

    label: Annotated[str, Field(max_length=200)] | None = None
    """The name that its author gives this version, such as "main" or "HEAD~3"."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")] | None = None
    """The git commit that the file is of, or that its changes are based on."""
    dirty: bool = False
    """True if the file has changes that are not committed."""
    diff: Annotated[str, Field(max_length=200)] | None = None
    """Those changes in short: "1 file changed, 3 insertions(+)"."""


COORDINATES = ("function", "file")
"""The parts of a field of code that are coordinates of a case."""


class CodeSpec(StrictModel):
    """A function or a class in an uploaded Python file (`PUT /files/{sha256}`)."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the file, in lower-case hexadecimal digits."""
    function: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name in the file."""
    file: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")] | None = None
    """The name that the file has where it comes from. Of the same function, files with one name are versions of one
    case."""
    revision: Revision | None = None
    """Where it comes from."""

    def label(self) -> str:
        """Return the name that tables show: `attention@my_attention.py`. No registered name has an @ in it."""
        return f"{self.function}@{self.file or UNNAMED}"


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
            if {"sha256", "function"} <= set(value):
                yield (*at, field), str(value["sha256"])
            else:
                yield from codes_of(value, (*at, field))


def coordinates(identity: Mapping[str, Scalar], field: str, code: CodeSpec | None) -> dict[str, Scalar]:
    """Return a case's identity with the coordinates of a field of code, which are null if it has no effect."""
    kept = {name: value for name, value in identity.items() if name.partition(".")[0] != field}
    return {**kept, **{f"{field}.{name}": None if code is None else getattr(code, name) for name in COORDINATES}}


def names(field: str) -> tuple[str, ...]:
    """Return the names of the coordinates of a field of code."""
    return tuple(f"{field}.{name}" for name in COORDINATES)


class ImplementationsSpec(SpecBase):
    """Base of kinds that measure implementations of one operation, with uploaded code beside them."""

    if TYPE_CHECKING:
        implementations: list[str]
        code: CodeSpec | None

    @model_validator(mode="after")
    def _there_is_something_to_measure(self) -> Self:
        check_lists(self)
        if not self.implementations and self.code is None:
            raise field_error("implementations", "there is nothing to measure: name at least one, or give code")
        return self

    def names(self) -> list[str]:
        """Return the names of the implementations as cells have them, that of uploaded code last."""
        return [*self.implementations, *([] if self.code is None else [self.code.label()])]

    def is_code(self, implementation: Scalar) -> bool:
        """Return True if a cell's implementation is the uploaded code."""
        return self.code is not None and implementation == self.code.label()

    def overview(self) -> dict[str, Scalar]:
        """Return all coordinates of the job, with the uploaded code among the implementations."""
        whole = coordinates(super().overview(), "code", self.code)
        return {"implementation": None} | whole | {"implementation": listed(self.names())}
