"""/specs: the specs of all kinds as JSON Schema, from which forms and the command line are built."""

import functools
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from app.api.names import NOBODY_RUNS_CODE, Known, known_names
from app.api.parameters import NO_QUERY, Json
from app.api.services import CurrentServices
from app.specs import KINDS, SpecBase
from app.specs._base import NAMED, NEEDED
from app.specs._code import RUNS_CODE

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
