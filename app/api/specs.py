"""/specs: what jobs may ask for, as JSON Schema; forms and the command line are built from it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from app.api.names import Known, field_of, known_names
from app.api.parameters import NO_QUERY, Json
from app.api.services import CurrentServices
from app.specs import KINDS, SpecBase

router = APIRouter(prefix="/specs", tags=["specs"])


@router.get("", dependencies=[NO_QUERY], summary="The kinds of job")
def specs(services: CurrentServices) -> Response:
    """Schema, presets and a default spec that runs, per kind; names that only workers know are enumerated."""
    known = known_names(services)
    return Json({"data": [describe(kind, spec, known) for kind, spec in sorted(KINDS.items())], "next": None})


def describe(kind: str, spec: type[SpecBase], known: Known) -> dict[str, Any]:
    """One kind of job."""
    return {
        "kind": kind,
        "description": (spec.__doc__ or "").strip(),
        "schema": schema_with_names(spec, known),
        "presets": spec.presets,
        "example": spec.example().model_dump(mode="json"),
        "table": {"rows": list(spec.table_rows), "columns": list(spec.table_columns)},
        "available": not known or kind in known.kinds,
    }


def schema_with_names(spec: type[SpecBase], known: Known) -> dict[str, Any]:
    """The spec's JSON Schema; a field that takes a worker's name lists the names that registered workers have."""
    schema = spec.model_json_schema()
    example = spec.example()
    for requirement in example.requirements() if known else ():
        family, _, name = requirement.partition(":")
        place = _schema_at(schema, field_of(example, family, name))
        if place is not None:
            place["enum"] = known.family(family)
    return schema


def _schema_at(schema: dict[str, Any], location: tuple[int | str, ...]) -> dict[str, Any] | None:
    place: Any = schema
    for part in location:
        if "$ref" in place:
            place = schema["$defs"][place["$ref"].rpartition("/")[2]]
        place = place.get("items") if isinstance(part, int) else place.get("properties", {}).get(part)
        if place is None:
            return None
    return place if isinstance(place, dict) else None
