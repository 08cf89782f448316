"""Turns pydantic's errors into JSON pointers (RFC 6901) into the body as the client sent it, each with a cure."""

import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from app.errors import FieldError, did_you_mean
from app.specs import KINDS
from app.specs._base import Location

MAX_ERRORS = 50
SHOWN_VALUE_CHARACTERS = 60
OF_SUBMISSION = {
    **{name: f"--{name.replace('_', '-')}" for name in ("timeout_s", "priority", "name", "label", "max_attempts")},
    "labels": "--label",
}
"""What a job has beside its spec, with the command line's option."""
WITH_UNIT = re.compile(r"\d[\d.]*\s*[A-Za-z%]+")


def pointer(location: Iterable[int | str]) -> str:
    """Return the JSON pointer of a location; "" is the whole document."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


def field_errors(
    errors: Sequence[ErrorDetails], body: Any, model: type[BaseModel], *, union_at: Location | None = None
) -> tuple[FieldError, ...]:
    """Return the errors that `model` found in `body`. `union_at` is the location of the job spec in it, if it has one:
    pydantic puts the union's tag after it, which the client never sent."""
    by_place = {}
    for error in errors[:MAX_ERRORS]:
        location = sent_location(error, body, union_at)
        field = FieldError(pointer(location), describe(error, model))
        by_place[field.pointer, field.detail] = field
    return tuple(by_place.values())


def sent_location(error: ErrorDetails, body: Any, union_at: Location | None) -> Location:
    """Return an error's place in the body as sent: without union tags, labels and marks of keys, with fields added."""
    location = list(error["loc"])
    if union_at is not None and error["loc"][: len(union_at)] == union_at:
        del location[len(union_at) : len(union_at) + 1]
    sent: list[int | str] = []
    value = body
    for position, part in enumerate(location):
        inside = _descend(value, part)
        is_new = error["type"] == "missing" and position == len(location) - 1
        if inside is _NOTHING and not is_new:
            continue
        sent.append(part)
        value = inside
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        sent.append("kind")
    if error["type"] == "field_error":
        sent.extend(str(error["ctx"]["field"]).split("/"))
    return tuple(sent)


_NOTHING: Any = object()


def _descend(value: Any, part: int | str) -> Any:
    if isinstance(value, Mapping):
        return value.get(part, _NOTHING)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return _NOTHING


def describe(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Say in one sentence what is wrong and how to cure it."""
    kind = error["type"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _describe_kind(error)
    if kind == "extra_forbidden":
        return _describe_unknown(str(error["loc"][-1]), model_at(model, error["loc"][:-1]))
    if kind in ("missing", "field_error"):
        return error["msg"]
    if kind == "model_type" and (paths := _fields_that_take(error["input"], error["loc"], model)):
        return f"{error['msg']}; got {shown(error['input'])}; did you mean {paths[0]}?"
    several = isinstance(error["input"], str) and "," in error["input"] and any(part in KINDS for part in error["loc"])
    cure = "; one job for each of several values is a sweep: `flopwatch sweep`" if several else ""
    field = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")
    has_unit = kind == "float_type" or (kind == "int_type" and field.endswith(("_s", "_mib")))
    if has_unit and WITH_UNIT.fullmatch(str(error["input"])):
        cure = "; write the number alone, in the unit of the field's name"
    if kind == "literal_error":
        known = re.findall("'([^']+)'", error["ctx"]["expected"])
        cure = cure or did_you_mean(str(error["input"]), known)
    return f"{error['msg']}; got {shown(error['input'])}{cure}"


def _describe_kind(error: ErrorDetails) -> str:
    # A spec inside another spec must be of a kind that contains no specs.
    inside = any(KINDS[part].holds_specs for part in error["loc"] if isinstance(part, str) and part in KINDS)
    kinds = sorted(kind for kind, spec in KINDS.items() if not (inside and spec.holds_specs))
    known = ", ".join(kinds)
    if error["type"] == "union_tag_not_found":
        return f"kind is missing; known kinds: {known}"
    tag = error["ctx"]["tag"]
    what = "Unknown kind" if tag not in KINDS else "A spec inside another one cannot be of kind"
    hint = did_you_mean(str(tag), kinds) or ";"
    return f"{what} {shown(tag)}{hint} known kinds{' here' if inside else ''}: {known}"


def _describe_unknown(name: str, model: type[BaseModel] | None) -> str:
    known = [] if model is None else list(model.model_fields)
    inside = _fields_inside(model, name) if model is not None else []
    near = inside or difflib.get_close_matches(name, known, n=1)
    if (option := OF_SUBMISSION.get(name.replace("-", "_"))) and not near and "kind" in known:
        return f"Unknown field; it is no part of the spec, but of the job: option {option}"
    hint = f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(known)}" if known else ""
    return f"Unknown field{hint}"


def _fields_inside(model: type[BaseModel], name: str) -> list[str]:
    """Return the dotted paths of the fields of this name in the objects that a model has: "model.size" for "size"."""
    objects = ((field, _model_in(info.annotation)) for field, info in model.model_fields.items())
    return [f"{field}.{name}" for field, inner in objects if inner is not None and name in inner.model_fields]


def _fields_that_take(value: Any, location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Return `field=value` for the fields with values to choose from that take the value given for their object:
    "model.size=tiny" for "tiny"."""
    inner = model_at(model, location)
    if inner is None or not isinstance(value, str):
        return []
    choices = {name: _choices(info.annotation) for name, info in inner.model_fields.items()}
    return [f"{location[-1]}.{name}={value}" for name, known in choices.items() if value in known]


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def model_at(model: type[BaseModel], location: Iterable[int | str]) -> type[BaseModel] | None:
    """Return the model of the object at a pydantic location below `model`; None if there is none."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return None
        if isinstance(part, str) and part in current.model_fields:
            current = _model_in(current.model_fields[part].annotation)
        elif isinstance(part, str) and part in KINDS:
            current = KINDS[part]
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in typing.get_args(annotation) if (model := _model_in(part)) is not None), None)


def shown(value: Any) -> str:
    """Return a value as JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_VALUE_CHARACTERS else text[: SHOWN_VALUE_CHARACTERS - 1] + "…"


def parameter_errors(errors: Iterable[Any], known: Sequence[str] = ()) -> tuple[FieldError, ...]:
    """Return the errors of query parameters (`known` are the route's), headers and path parameters. They have no place
    in the body, so the pointer is empty."""
    fields = []
    for error in errors:
        where, *rest = error["loc"]
        name = ".".join(str(part) for part in rest)
        if error["type"] == "extra_forbidden":
            hint = did_you_mean(name, known) or f": leave it out; known here: {', '.join(known)}"
            detail = f"Unknown {where} parameter {name!r}{hint}"
        else:
            detail = f"{where.capitalize()} parameter {name!r}: {error['msg']}; got {shown(error['input'])}"
        fields.append(FieldError("", detail))
    return tuple(fields)
