"""/specs: the specs of all kinds as JSON Schema, from which forms and the command line are built, with the names that
only workers know (kinds, models, attention implementations), which are checked in specs, too.

The server cannot know these names by itself, since it imports no torch. While no worker has registered, it accepts any
name, and the worker that claims the job decides.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from app.api.parameters import NO_QUERY, Json
from app.api.pointers import pointer, shown
from app.api.services import CurrentServices, Services
from app.errors import FieldError, InvalidRequest, did_you_mean
from app.specs import KINDS, SpecBase
from app.specs._base import NAMED, NEEDED, Location, names_in
from app.specs._code import ALLOW_IT, RUNS_CODE, codes_of
from app.store.files.uploads import url_of

NOBODY_RUNS_CODE = f"No worker runs uploaded code: {ALLOW_IT}"


class Known:
    """The names that registered workers have, per family; falsy while no worker has ever registered."""

    def __init__(
        self, names: dict[str, set[str]], existing_files: Callable[[Collection[str]], set[str]] = lambda _: set()
    ) -> None:
        self.kinds = frozenset(names["kinds"])
        self.capabilities = frozenset(names["capabilities"])
        self.existing_files = existing_files
        """A function that returns the existing ones of these uploaded files, given by SHA-256."""

    def __bool__(self) -> bool:
        return bool(self.kinds or self.capabilities)

    def family(self, name: str) -> list[str]:
        """Return the known names of a family ("attention", "model", …), sorted."""
        prefix = name + ":"
        return sorted(
            capability.removeprefix(prefix) for capability in self.capabilities if capability.startswith(prefix)
        )


def known_names(services: Services) -> Known:
    return Known(services.reading.known_names(), services.uploads.known)


def check_names(spec: SpecBase, known: Known, at: str) -> None:
    """Refuse a kind or name that no worker has ever had; `at` is the pointer to the spec in the body."""
    errors = tuple(FieldError(at + pointer(where), detail) for where, detail in unknown_names(spec, known))
    if errors:
        raise InvalidRequest(f"{errors[0].pointer}: {errors[0].detail}", errors=errors)


def unknown_names(spec: SpecBase, known: Known) -> Iterator[tuple[Location, str]]:
    """Yield an error for each kind or name in `spec` that no worker has: its location, and the names to choose from."""
    if RUNS_CODE in spec.requirements():
        yield from _wrong_code(spec, known)
    if not known:
        return
    for where, kind in _kinds_in(spec):
        if kind not in known.kinds:
            yield where, f"No worker runs {shown(kind)}; they run: {', '.join(sorted(known.kinds))}"
    for where, family, name in names_in(spec):
        if f"{family}:{name}" not in {RUNS_CODE, *known.capabilities}:
            choices = known.family(family)
            listed = ", ".join(choices) or "none at all"
            yield where, f"No worker has the {family} {shown(name)}; they have: {listed}{did_you_mean(name, choices)}"


def _wrong_code(spec: SpecBase, known: Known) -> Iterator[tuple[Location, str]]:
    """Yield an error for each uploaded function that no worker may run, or whose file does not exist."""
    named = list(codes_of(spec.model_dump(mode="json")))
    files = known.existing_files({sha256 for _, sha256 in named})
    for where, sha256 in named:
        if known and RUNS_CODE not in known.capabilities:
            yield where, NOBODY_RUNS_CODE
        elif sha256 not in files:
            yield (*where, "sha256"), f"Nobody has uploaded such a file: send it first, with PUT {url_of(sha256)}"


def _kinds_in(spec: SpecBase, at: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yield the locations of kinds: that of the spec, and those of the specs that it contains."""
    yield (*at, "kind"), spec.kind
    for field in type(spec).model_fields:
        value = getattr(spec, field)
        if isinstance(value, SpecBase):
            yield from _kinds_in(value, (*at, field))


router = APIRouter(prefix="/specs", tags=["specs"])


@router.get("", dependencies=[NO_QUERY], summary="The kinds of job")
def get_specs(services: CurrentServices) -> Response:
    """Returns the schema, the presets and a default spec that runs, per kind; names that only workers know are
    enumerated."""
    known = known_names(services)
    return Json({"data": [describe(kind, spec, known) for kind, spec in sorted(KINDS.items())], "next": None})


def describe(kind: str, spec: type[SpecBase], known: Known) -> dict[str, Any]:
    """Return the description of one kind of job."""
    return {
        "kind": kind,
        "description": (spec.__doc__ or "").strip(),
        "schema": with_names(_schema(spec), known),
        "presets": spec.presets,
        "example": spec.example().model_dump(mode="json"),
        "table": {"rows": list(spec.table_rows), "columns": list(spec.table_columns)},
        "available": not known or kind in known.kinds,
    }


@functools.cache
def _schema(spec: type[SpecBase]) -> dict[str, Any]:
    """Return the JSON Schema of a kind, cached since it takes milliseconds to make. Callers must not change it."""
    return spec.model_json_schema()


def with_names(schema: Any, known: Known) -> Any:
    """Return a JSON Schema in which every field that takes workers' names lists those that registered workers have.

    A field that needs a name which no worker has allows its default only.
    """
    if isinstance(schema, list):
        return [with_names(part, known) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: with_names(part, known) for key, part in schema.items()}
    if known and isinstance(needed := schema.get(NEEDED), str) and needed not in known.capabilities:
        lacking = NOBODY_RUNS_CODE if needed == RUNS_CODE else f"No worker has the {needed.replace(':', ' ')}"
        about = f"{schema['description']} {lacking}."
        return {**named, "description": about, "enum": [schema["default"]]}
    names = known.family(schema[NAMED]) if isinstance(schema.get(NAMED), str) else []
    return {**named, "enum": names} if names else named
