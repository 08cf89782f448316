"""What every job spec has: strict fields, the resources it needs, the cases it measures, and how its tables look."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

from app.specs._identity import Case, Scalar

Device = Literal["auto", "cpu", "cuda"]
Location = tuple[int | str, ...]
MAX_CELLS = 10_000
"""Of one job."""

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.-]+$")]
WarmupSteps = Annotated[int, Field(ge=0, le=100_000)] | None
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown fields, NaN, infinity and values of another type ("128" is no number)."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Named:
    """Marks a field, or the items of a list, as a name that workers register: `Annotated[Name, Named("attention")]`.

    Requirements, pointers to unknown names and the enumerations in JSON Schema follow from this mark.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), NAMED: self.family}


NAMED = "x-flopwatch-names"
"""Key in JSON Schema: the family of names that a field takes."""


class Resources(StrictModel):
    """What a job needs of a host, known without torch; the queue keeps these as indexed columns of the job."""

    device_type: Device | Literal["none"]
    """`auto`: a GPU where the worker has one, else the CPU. `none`: the job only computes on paper, beside others."""
    devices: int
    """Number of GPUs (of processes, on a CPU)."""
    exclusive_host: bool = False
    """Nothing else may run on the host meanwhile. CPU jobs always run alone, whatever this says."""


class SpecBase(StrictModel):
    """Base of every job kind's spec. A subclass sets `kind` to a Literal with its file's name as the default."""

    kind: str

    holds_specs: ClassVar[bool] = False
    """Whether a field of it is a spec of another kind."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named partial specs that forms and the CLI offer."""
    unmeasured: ClassVar[frozenset[str]] = frozenset({"device", "seed", "measure_steps"})
    """Fields that do not change the measured work: where it runs, how often it is repeated. Every other field is part
    of a case's identity."""
    axes: ClassVar[Mapping[str, str]] = {}
    """List fields that make a grid of cells, with the name of the coordinate that one value of each becomes."""
    added: ClassVar[Mapping[str, Scalar]] = {}
    """Coordinates of fields that came after the kind's first version, or had no effect on everything then, with the
    default they came with. At that value they are left out of a case's key, so that earlier results keep theirs."""
    labels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Coordinates for people (`model`: "small"), with the coordinates that each stands for in tables."""
    table_rows: ClassVar[tuple[str, ...]] = ()
    """Coordinates that make the rows of this kind's default table."""
    table_columns: ClassVar[tuple[str, ...]] = ()
    """Metrics that make its columns, in this order: the handful that people look at first."""

    def resources(self) -> Resources:
        """Devices this job needs."""
        raise NotImplementedError

    def requirements(self) -> frozenset[str]:
        """Names that a worker must have, as "family:name": "attention:eager", "model:transformer_lm"."""
        return frozenset(f"{family}:{name}" for _, family, name in names_in(self))

    def cells(self) -> Sequence[Any]:
        """The cells of a grid, in the order they run; of a kind without a grid, one without coordinates."""
        return [None]

    def case(self, cell: Any = None) -> Case:
        """The case that a cell measures: every field that changes the work, flat, with the cell's value on each axis.

        It is derived from the fields, so that a new field is part of it unless the class says otherwise: a grid's cell
        has the same case as a job with that single cell.
        """
        identity = flat(self.model_dump(mode="json", exclude={"kind", *self.unmeasured, *self.axes}))
        if cell is not None:
            identity = {**cell.coordinates(), **identity}
        identity, labels = self.normalised(identity)
        return Case(kind=self.kind, identity=identity, labels=labels, added=self.added)

    def cases(self) -> list[Case]:
        """The case of every cell, in the order they run."""
        return [self.case(cell) for cell in self.cells()]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """The identity with presets spelled out and null for what has no effect here; and labels for people."""
        return identity, {}

    def summary(self) -> dict[str, Scalar]:
        """What lists show of the job: the coordinates of its table's rows, several values of an axis as one."""
        everything = self.overview()
        return {name: everything[name] for name in self.table_rows if name in everything}

    def overview(self) -> dict[str, Scalar]:
        """All coordinates of the job at one glance: those of its case, or the values along each axis ("16/32/64")."""
        if not self.axes:
            return dict(self.case().coordinates)
        common = flat(self.model_dump(mode="json", exclude={"kind", *self.unmeasured, *self.axes}))
        along = {name: listed(getattr(self, field)) for field, name in self.axes.items() if getattr(self, field)}
        return {**along, **common}

    @classmethod
    def example(cls) -> Self:
        """The spec with every default, which runs."""
        return cls.model_validate({})


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested objects as one: {"model": {"d_ff": 8}} as {"model.d_ff": 8}."""
    found: dict[str, Scalar] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def names_in(model: BaseModel, at: Location = ()) -> Iterator[tuple[Location, str, str]]:
    """Where in a spec names stand that workers register: (location, family, name)."""
    for field, info in type(model).model_fields.items():
        value, family = getattr(model, field), _family(info)
        if isinstance(value, BaseModel):
            yield from names_in(value, (*at, field))
        elif family is not None and isinstance(value, str):
            yield (*at, field), family, value
        elif family is not None and isinstance(value, list):
            yield from (((*at, field, index), family, name) for index, name in enumerate(value))


def _family(info: FieldInfo) -> str | None:
    marks = [*info.metadata, *_marks(info.annotation)]
    return next((mark.family for mark in marks if isinstance(mark, Named)), None)


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks(part)


def listed(values: Sequence[Scalar]) -> Scalar:
    """Several values as one, for people: "16/32/64"; a single value is itself."""
    return values[0] if len(values) == 1 else "/".join(str(value) for value in values)


def check_lists(spec: SpecBase) -> None:
    """See that no axis of the grid has a value twice: the same case would be measured twice.

    Raises:
        PydanticCustomError: one has; for a model validator to raise.
    """
    for field in spec.axes:
        values = getattr(spec, field) or []
        repeated = next((value for index, value in enumerate(values) if value in values[:index]), None)
        if repeated is not None:
            raise field_error(field, f"{repeated!r} is there twice")


def check_number_of_cells(cells: Iterable[object], field: str) -> None:
    """See that they are at most MAX_CELLS, without making more of them than that.

    Raises:
        PydanticCustomError: they are more; blames `field`; for a model validator to raise.
    """
    if sum(1 for _ in itertools.islice(cells, MAX_CELLS + 1)) > MAX_CELLS:
        raise field_error(field, f"more than {MAX_CELLS} cells: make several jobs of it")


def field_error(field: str, message: str) -> PydanticCustomError:
    """An error of a model validator that belongs to one `field` (a name, or a/b path below the model).

    The API appends the field to the pointer; pydantic alone would blame the whole model.
    """
    # Braces would be taken for a template's.
    return PydanticCustomError("field_error", "{message}", {"field": field, "message": message})
