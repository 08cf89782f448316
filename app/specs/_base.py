"""The base of every job spec: strict fields, the resources that it needs, the cases that it measures, and the layout of
its tables."""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from app.specs._identity import Case, Scalar

Device = Literal["auto", "cpu", "cuda"]
Location = tuple[int | str, ...]
MAX_CELLS = 10_000
MAX_LISTED = 4
"""Largest number of values that the text of a list has."""

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.-]+$")]
WarmupSteps = Annotated[int, Field(ge=0, le=100_000)] | None
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
KeyHeads = Annotated[int, Field(ge=1, le=1024)] | None
Window = Annotated[int, Field(ge=1, le=1_048_576)] | None
DocumentLengths = (
    Annotated[list[Annotated[int, Field(ge=0, le=1_048_576)]], Field(min_length=1, max_length=1000)] | None
)


class StrictModel(BaseModel):
    """A frozen model that refuses unknown fields, NaN, infinity and values of another type ("128" is not a number)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the fields' docstrings: pydantic's `use_attribute_docstrings` takes a third of the import."""
        described = handler(schema)
        for name, field in handler.resolve_ref_schema(described)["properties"].items():
            for base in cls.__mro__[: cls.__mro__.index(StrictModel)]:
                if (text := _docstrings(base.__module__).get((base.__name__, name))) is not None:
                    field.setdefault("description", text)
        return described


@functools.cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """Return the text below each field of a module's classes, by the names of both."""
    return {
        (definition.name, ast.unparse(field.target)): inspect.cleandoc(text.value.value)
        for definition in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


class Named:
    """Marks a field, or the items of a list, as a name that workers register: `Annotated[Name, Named("attention")]`.

    Requirements, pointers to unknown names and the enumerations in JSON Schema follow from this mark.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), NAMED: self.family}


class Needs:
    """Marks a field that, when set, needs a name which workers register: `Annotated[bool, Needs("tool", "nsys")]`.

    A field is set if it is neither false nor null. Requirements, pointers to names that no worker has, and a note in
    JSON Schema follow from this mark.
    """

    def __init__(self, family: str, name: str) -> None:
        self.family = family
        self.name = name

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), NEEDED: f"{self.family}:{self.name}"}


NAMED = "x-flopwatch-names"
"""Key in JSON Schema: the family of names that a field takes."""
NEEDED = "x-flopwatch-needs"
"""Key in JSON Schema: the name, as "family:name", that a worker must have if the field is set."""


class Resources(StrictModel):
    """The resources that a job needs on a host, known without torch. The queue keeps them as indexed columns."""

    device_type: Device | Literal["none"]
    """`auto`: a GPU if the worker has one, else the CPU. `none`: the job only estimates, beside jobs on GPUs."""
    devices: int
    """Number of GPUs (of processes, on a CPU), on each node."""
    nodes: int = 1
    """Number of nodes. Only the worker of a cluster runs a job on several."""
    exclusive_host: bool = False
    """True if nothing else may run on the host meanwhile. CPU jobs run alone even if this is False."""

    @property
    def total(self) -> int:
        """The devices on all nodes; without a GPU one: the CPU."""
        return 1 if self.device_type in ("cpu", "none") else self.devices * self.nodes


NODES = "nodes"
"""Family of the names that jobs on several nodes need: "nodes:2"."""


def name_of_nodes(number: int) -> str:
    """Return the name that a worker has which can run a job on so many nodes."""
    return f"{NODES}:{number}"


CHECKS_FIRST = ("case", "check", "ok", "severity", "detail")
"""The columns shown by default of the table of all checks, which jobs of every kind may have."""


@dataclass(frozen=True)
class Cell:
    """One cell of a kind's grid. A subclass is a frozen dataclass, whose fields are the cell's coordinates."""

    def coordinates(self) -> dict[str, Scalar]:
        """Return the coordinates that distinguish the cells of one job."""
        return asdict(self)

    @property
    def title(self) -> str:
        """Return the cell's name for progress lines."""
        raise NotImplementedError


class SpecBase(StrictModel):
    """Base of every job kind's spec. A subclass sets `kind` to a Literal with its file's name as the default."""

    kind: str

    holds_specs: ClassVar[bool] = False
    """True if one of its fields is a spec of another kind."""
    held_kinds: ClassVar[tuple[str, ...] | None] = None
    """The kinds that such a spec may have; None: any that holds none itself."""
    has_sides: ClassVar[bool] = False
    """True if it measures two such specs, to compare them."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named partial specs that forms and the CLI offer."""
    unmeasured: ClassVar[frozenset[str]] = frozenset({"device", "seed", "measure_steps"})
    """Fields that do not change the measured work: where it runs, how often it is repeated. Every other field is part
    of a case's identity."""
    axes: ClassVar[Mapping[str, str]] = {}
    """List fields that make a grid of cells, with the name of the coordinate that one value of each becomes."""
    added: ClassVar[Mapping[str, Scalar]] = {}
    """Coordinates of fields that were added after the kind's first version, or did not affect every case then, with
    their original defaults. A case's key leaves them out at that value, so that earlier results keep their keys."""
    gone: ClassVar[Mapping[str, Scalar]] = {}
    """Fields that release 0.1.0 had, with the values at which they had no effect."""
    labels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Coordinates for people (`model`: "small"), with the coordinates that each represents in tables."""
    table_rows: ClassVar[tuple[str, ...]] = ()
    """Coordinates that make the rows of this kind's default table."""
    table_columns: ClassVar[tuple[str, ...]] = ()
    """Metrics that make the columns of this kind's default table, in this order: the few that people look at first."""
    implied: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Coordinates that tables leave out beside another one, unless rows look the same without them: by its name."""
    table_notes: ClassVar[Mapping[str, Mapping[Scalar, str]]] = {}
    """Coordinates that say how times were taken, with the sentence that a table of cases with each value has below."""
    metric_notes: ClassVar[Mapping[frozenset[str], str]] = {}
    """Metrics, with the sentence that a table with a column of one of them has below."""
    process_metrics: ClassVar[frozenset[str]] = frozenset()
    """Metrics each of whose samples is of another process."""
    first_plotted: ClassVar[str | None] = None
    """The metric that plots of a sweep, and of a kind without panels of its own, show first; None: a time, as for most
    kinds."""
    has_own_phases: ClassVar[bool] = False
    """True if the user's code may name phases, whose times are columns of the first table."""
    first_tables: ClassVar[tuple[str, ...]] = ()
    """Tables that a unit reports, the most important first; `kernels` includes `kernels-forward`. Others follow."""
    answers: ClassVar[tuple[str, ...]] = ()
    """Reported tables that answer the kind's question: a job's page, `show` and `--wait` print them before all else. A
    table with one column of text is printed as sentences."""
    finding: ClassVar[str] = ""
    """The check of the verdict whose note is what a reader wants to know first, where it did not pass."""
    first_columns: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The columns shown by default of tables with very many columns, by the table's name or its part before "-". Other
    tables show all."""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_release_0_1_0(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        for name, default in cls.gone.items():
            if fields.get(name, default) is not default:
                raise field_error(name, "was removed: leave it out")
        return {name: value for name, value in fields.items() if name not in cls.gone}

    @classmethod
    def columns_first(cls, name: str) -> tuple[str, ...] | None:
        """Return the columns of a reported table that are shown by default; None: all of them."""
        known = {"checks": CHECKS_FIRST, **cls.first_columns}
        return next((known[part] for part in (name, name.partition("-")[0]) if part in known), None)

    @classmethod
    def table_place(cls, name: str) -> int:
        """Return the sort key of a reported table among this kind's tables; tables with equal keys keep their order."""
        known = cls.first_tables
        places = [known.index(part) for part in (name, name.partition("-")[0]) if part in known]
        return places[0] if places else len(known)

    def drawn(self) -> Self:
        """Return the spec as a job keeps it, with what is drawn at random at submission."""
        return self

    def resources(self) -> Resources:
        """Return the devices that this job needs; by default one of its field `device`."""
        return Resources(device_type=self.device, devices=1)  # type: ignore[attr-defined]  # of kinds that have it

    def idle_fields(self) -> Collection[str]:
        """Return the fields that another field makes idle, whatever their values."""
        return ()

    def requirements(self) -> frozenset[str]:
        """Return the names that a worker must have, as "family:name": "attention:eager", "model:transformer_lm"."""
        names = frozenset(f"{family}:{name}" for _, family, name in names_in(self))
        nodes = self.resources().nodes
        return names if nodes == 1 else names | {name_of_nodes(nodes)}

    def cells(self) -> Sequence[Any]:
        """Return the cells in the order they run. A kind without a grid has one cell, which has no coordinates."""
        return [None]

    def number_of_cells(self) -> int:
        """Return the length of `cells()`. A kind with a grid counts them without making any, since a short spec may
        describe a hundred million."""
        return len(self.cells())

    def case(self, cell: Any = None) -> Case:
        """Return the case that a cell measures: every field that changes the work, flat, with the cell's axis values.

        The case is derived from the fields, so a new field is part of it unless the class says otherwise. A cell of a
        grid has the same case as a job with that single cell.
        """
        identity = self._measured()
        if cell is not None:
            identity = {**cell.coordinates(), **identity}
        identity, labels = self.normalised(identity)
        return Case(kind=self.kind, identity=identity, labels=labels, added=self.added)

    def cases(self) -> list[Case]:
        """Return the case of every cell, in the order they run."""
        return [self.case(cell) for cell in self.cells()]

    def without_effect(self) -> list[str]:
        """Return the fields, as dotted paths, that are not as by default and change nothing: no case uses them."""
        defaults = flat(type(self).example().model_dump(mode="json"))
        fields = flat(self.model_dump(mode="json", exclude={"kind", *self.unmeasured}))
        idle = [name for name, value in fields.items() if value not in (None, [], defaults.get(name))]
        idle = [name for name in idle if ".revision." not in name]  # clients say where code comes from, not people
        for cell in self.cells():
            if not idle:
                break
            identity = self.case(cell).identity
            idle = [name for name in idle if not _is_used(self.axes.get(name, name), identity)]
        return idle

    def changed(self, *names: str) -> list[str]:
        """Return those of the fields that are not as by default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Return the identity, with presets spelled out and null for fields without effect, and labels for people."""
        return identity, {}

    def summary(self) -> dict[str, Scalar]:
        """Return what lists show of the job: its displayed coordinates, with the values of an axis joined in one."""
        return self.displayed(self.overview())

    @classmethod
    def displayed(cls, coordinates: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the coordinates that people see of a job or a case: those of its table's rows, and others that are not
        as by default, so that no two jobs look the same. A label replaces its coordinates."""
        row = {name: coordinates[name] for name in cls.table_rows if name in coordinates}
        behind_labels = {name for label, names in cls.labels.items() if label in coordinates for name in names}
        defaults = cls._defaults()
        others = {
            name: value
            for name, value in coordinates.items()
            if value is not None and name not in behind_labels and json.dumps(value) not in defaults.get(name, ())
        }
        return row | others

    @classmethod
    @functools.cache
    def _defaults(cls) -> Mapping[str, Collection[str]]:
        """Return the values, as JSON, that each coordinate has by default."""
        example = cls.example()
        defaults: dict[str, list[str]] = {}
        for values in (flat(example.model_dump(mode="json", exclude={*cls.axes})), example.overview()):
            for name, value in values.items():
                defaults.setdefault(name, []).append(json.dumps(value))
        return defaults

    def overview(self) -> dict[str, Scalar]:
        """Return all coordinates of the job; an axis with several values has them joined in one ("16/32/64")."""
        if not self.axes:
            return dict(self.case().coordinates)
        common = self._measured()
        along = {name: listed(getattr(self, field)) for field, name in self.axes.items() if getattr(self, field)}
        return {**along, **common}

    def _measured(self) -> dict[str, Scalar]:
        """Return the fields that change the work and are no axes, flat; a list is one text."""
        fields = flat(self.model_dump(mode="json", exclude={"kind", *self.unmeasured, *self.axes}))
        return {name: _as_text(name, value) if isinstance(value, list) else value for name, value in fields.items()}

    @classmethod
    def example(cls) -> Self:
        """Return the spec with every default. A worker can run it."""
        return cls.model_validate({})


def without_effect(specs: Sequence[SpecBase]) -> list[str]:
    """Return the fields that change nothing in any of these specs that do not leave them as by default."""
    idle = [set(spec.without_effect()) for spec in specs]
    usual = [flat(type(spec).example().model_dump(mode="json")) for spec in specs[:1]]
    values = [flat(spec.model_dump(mode="json")) for spec in specs]
    return [
        field
        for field in dict.fromkeys(field for spec in specs for field in spec.without_effect())
        if all(field in own or its.get(field) == usual[0].get(field) for own, its in zip(idle, values, strict=True))
    ]


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Flatten nested objects into one: {"model": {"d_ff": 8}} becomes {"model.d_ff": 8}."""
    flattened: dict[str, Scalar] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[prefix + name] = value
    return flattened


def with_paths(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with these values at their dotted paths; what others of the same base share is copied."""
    spec = dict(base)
    for path, value in values.items():
        *parents, last = path.split(".")
        inside = spec
        for parent in parents:
            inside[parent] = dict(inside.get(parent) or {})
            inside = inside[parent]
        inside[last] = value
    return spec


def _is_used(coordinate: str, identity: Mapping[str, Scalar]) -> bool:
    """Return True if a case uses a coordinate or, where it is spelled out in others (model.size), one beside it."""
    if coordinate in identity:
        return identity[coordinate] is not None
    beside = coordinate.rpartition(".")[0] + "."
    return any(value is not None for name, value in identity.items() if name.startswith(beside))


def _as_text(name: str, values: Sequence[Scalar]) -> str:
    """Write a list as "512/256", a longer one as "16 document lengths (1a2b3c4d)": keys and tables have this text."""
    text = "/".join(map(str, values))
    if len(values) <= MAX_LISTED:
        return text
    what = name.rpartition(".")[2].replace("_", " ")
    return f"{len(values)} {what} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def names_in(model: BaseModel, at: Location = ()) -> Iterator[tuple[Location, str, str]]:
    """Yield (location, family, name) for each name in a spec that workers register, in fields that have an effect."""
    idle = model.idle_fields() if isinstance(model, SpecBase) else ()
    for field, marks in _marked(type(model)).items():
        if field in idle:
            continue
        value = getattr(model, field)
        for mark in marks:
            yield from (((*at, field, *where), mark.family, name) for where, name in _names(mark, value))
        if isinstance(value, BaseModel):
            yield from names_in(value, (*at, field))


def _names(mark: Named | Needs, value: Any) -> Iterator[tuple[Location, str]]:
    """Yield (location below the field, name) for each name in a marked field's value."""
    if isinstance(mark, Needs):
        if value is not None and value is not False:
            yield (), mark.name
    elif isinstance(value, str):
        yield (), value
    elif isinstance(value, list):
        yield from (((index,), name) for index, name in enumerate(value))


@functools.cache
def _marked(model: type[BaseModel]) -> dict[str, list[Named | Needs]]:
    return {
        field: [mark for mark in (*info.metadata, *_marks(info.annotation)) if isinstance(mark, Named | Needs)]
        for field, info in model.model_fields.items()
    }


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks(part)


def listed(values: Sequence[Scalar]) -> Scalar:
    """Join several values into one text for people: "16/32/64"; a single value is returned as it is."""
    return values[0] if len(values) == 1 else "/".join(str(value) for value in values)


def check_nodes(nodes: int, world_size: int) -> None:
    """Raise PydanticCustomError, which blames `nodes`, unless all nodes have as many ranks."""
    if world_size % nodes:
        raise field_error("nodes", f"each has as many ranks: {world_size} ranks cannot be divided by {nodes}")


def check_lists(spec: SpecBase) -> None:
    """Raise PydanticCustomError if an axis of the grid has a value twice: the job would measure the same case twice."""
    for field in spec.axes:
        seen: set[Scalar] = set()
        for value in getattr(spec, field) or []:
            if value in seen:
                raise field_error(field, f"{value!r} is there twice")
            seen.add(value)


def check_number_of_cells(spec: SpecBase, field: str) -> None:
    """Raise PydanticCustomError, which blames `field`, if the job has more than MAX_CELLS cells."""
    if (number := spec.number_of_cells()) > MAX_CELLS:
        raise field_error(field, f"{number} cells; a job has at most {MAX_CELLS}: make several jobs of it")


def check_documents(document_lengths: Sequence[int] | None, field: str, tokens: int, of: str) -> None:
    """Raise PydanticCustomError, which blames `field`, unless packed documents fill their sequence, whose number of
    tokens is the field `of`."""
    if document_lengths is not None and (total := sum(document_lengths)) != tokens:
        raise field_error(field, f"they have {total} tokens together, and {of} is {tokens}: make them equal")


def masks_with_effect(
    window: int | None, document_lengths: list[int] | None, tokens: int
) -> tuple[int | None, list[int] | None]:
    """Return a sequence's window and documents; None for a window or a single document that hides nothing of it."""
    longest = max(document_lengths or (tokens,))
    hides = window is not None and window < longest
    return window if hides else None, document_lengths if longest < tokens else None


def field_error(field: str, message: str) -> PydanticCustomError:
    """Build an error of a model validator that belongs to one `field` (a name, or a/b path below the model).

    The API appends the field to the pointer; pydantic alone would blame the whole model.
    """
    # Pydantic would read braces as those of a template.
    return PydanticCustomError("field_error", "{message}", {"field": field, "message": message})
