"""The form of a job, made from the JSON Schema of its kind: its fields, and the request that it sends.

Several values in a field that takes one make a sweep, with a job for each combination. Fields left at their default are
not sent, so that the request, and the equivalent command, are as short as people would write them. Empty fields are not
sent either, except where null has a meaning. The API reports wrong values: a text that is not a number is sent
unchanged.

A field that holds a spec, such as the baseline of a comparison, becomes the fields of that spec's kind: a *side* of the
form.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.api.bodies import JobOptions
from app.specs import KINDS
from app.specs._base import with_paths
from app.web import separated
from flopwatch.text.values import parse_json

Widget = Literal["choices", "number", "text", "json", "hidden"]
Type = Literal["integer", "number", "string", "boolean", "json"]

FIRST_FIELDS = 9
"""Number of fields that a form shows; the rest is folded unless one of them differs from its default."""
OPTIONS = "option."
OPTION_NAMES = ("name", "labels", "priority", "timeout_s", "max_attempts")
"""The fields of a submission beside its spec."""
USUAL = {"priority": 0, "max_attempts": JobOptions.model_fields["max_attempts"].default}
"""Numbers that need not be sent."""
SPEC = "spec."
SUFFIXES = {"_s": "s", "_mib": "MiB", "_gib": "GiB", "_mb": "MB", "_ms": "ms"}


@dataclass(frozen=True)
class Field:
    """One field of a form."""

    path: str
    """Dotted path below the spec, which begins with the side."""
    type: Type
    description: str
    choices: tuple[str, ...] = ()
    """The values that it takes; none: any of its type."""
    is_list: bool = False
    """True if its value is a list; else several values make a sweep."""
    is_nullable: bool = False
    default: Any = None
    """Its default in the whole spec."""
    own_default: Any = None
    """Its default inside its object, which applies when the object is given."""
    values: tuple[str, ...] = ()
    """The texts that are filled in."""
    errors: tuple[str, ...] = ()
    side: str = ""
    """The field of the form's spec that holds the spec to which it belongs: "baseline"; "" if that is the form's own.
    """

    @property
    def inner(self) -> str:
        """Its dotted path below the spec to which it belongs."""
        return self.path.removeprefix(f"{self.side}.")

    @property
    def key(self) -> str:
        """Its name in the form."""
        return SPEC + self.path

    @property
    def widget(self) -> Widget:
        if self.side and self.inner == "kind":
            return "hidden"
        if self.choices:
            return "choices"
        if self.type in ("integer", "number"):
            return "number"
        return "json" if self.type == "json" else "text"

    @property
    def unit(self) -> str:
        """The unit that its name ends with."""
        return next((unit for suffix, unit in SUFFIXES.items() if self.path.endswith(suffix)), "")

    @property
    def text(self) -> str:
        return self.values[0] if self.type == "json" and self.values else ", ".join(self.values)

    @property
    def is_changed(self) -> bool:
        return self.values != texts_of(self, self.default)


def fields_of(schema: Mapping[str, Any], example: Mapping[str, Any]) -> list[Field]:
    """Return the fields of a kind by its JSON Schema, with the names that workers have, filled with the defaults of its
    example."""
    return list(_walk(schema, schema.get("$defs", {}), example, ""))


def _walk(place: Mapping[str, Any], defs: Mapping[str, Any], example: Mapping[str, Any], at: str) -> Iterator[Field]:
    for name, property_schema in place.get("properties", {}).items():
        if "const" in property_schema:
            continue
        path, default = f"{at}{name}", example.get(name)
        inner, is_nullable = _resolved(property_schema, defs)
        if "discriminator" in inner and isinstance(default, Mapping) and default.get("kind") in KINDS:
            yield from _side(name, inner, defs, default)
            continue
        if "properties" in inner and not is_nullable and isinstance(default, Mapping) and "kind" not in default:
            yield from _walk(inner, defs, default, f"{path}.")
            continue
        field = _field(path, inner, defs)
        field = replace(
            field,
            description=property_schema.get("description") or inner.get("description") or "",
            is_nullable=is_nullable,
            default=default,
            own_default=property_schema.get("default"),
        )
        yield replace(field, values=texts_of(field, default))


def _side(name: str, union: Mapping[str, Any], defs: Mapping[str, Any], example: Mapping[str, Any]) -> Iterator[Field]:
    """Yield the fields of a spec that the form's spec holds in field `name`; it has the kind of this example."""
    kind = example["kind"]
    yield Field(f"{name}.kind", "string", "", values=(kind,), side=name)
    own, _ = _resolved({"$ref": union["discriminator"]["mapping"][kind]}, defs)
    for field in _walk(own, defs, example, f"{name}."):
        # The form's spec has replicates of its own, which count for all its sides.
        if field.path != f"{name}.replicates":
            yield replace(field, side=name)


def with_sides(example: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Return an example whose sides are the example of this kind; None: of the kind that they have."""
    return {
        name: KINDS[kind or value["kind"]].example().model_dump(mode="json") if _is_spec(value) else value
        for name, value in example.items()
    }


def side_kind(spec: Mapping[str, Any]) -> str | None:
    """Return the kind of a spec's sides; None if it has none."""
    return next((str(value["kind"]) for value in spec.values() if _is_spec(value)), None)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("kind") in KINDS


def _resolved(place: Mapping[str, Any], defs: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    if "$ref" in place:
        return _resolved(defs[place["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in place:
        others = [part for part in place["anyOf"] if part.get("type") != "null"]
        if len(others) == 1:
            return _resolved(others[0], defs)[0], len(place["anyOf"]) > 1
    return place, False


def _field(path: str, place: Mapping[str, Any], defs: Mapping[str, Any]) -> Field:
    if place.get("type") == "array":
        inner = _field(path, _resolved(place.get("items", {}), defs)[0], defs)
        return Field(path, "json", "") if inner.type == "json" else replace(inner, is_list=True)
    if place.get("type") == "boolean":
        return Field(path, "boolean", "", choices=("false", "true"))
    if place.get("type") in ("integer", "number", "string"):
        choices = tuple(str(choice) for choice in place.get("enum", ()))
        return Field(path, place["type"], "", choices=choices)
    return Field(path, "json", "")


def texts_of(field: Field, value: Any) -> tuple[str, ...]:
    """Return the texts that represent this value in a field."""
    if value is None or value == []:
        return ()
    if field.type == "json":
        return (json.dumps(value, indent=2, ensure_ascii=False),)
    values = value if isinstance(value, list) else [value]
    return tuple(value if isinstance(value, str) else json.dumps(value) for value in values)


def with_values(fields: Sequence[Field], spec: Mapping[str, Any]) -> list[Field]:
    """Return the fields with the values of a spec, which may be partial."""
    filled_fields = []
    for field in fields:
        *parents, last = field.path.split(".")
        inside: Any = spec
        for parent in parents:
            inside = inside.get(parent) if isinstance(inside, Mapping) else None
        if isinstance(inside, Mapping) and last in inside:
            filled_fields.append(replace(field, values=texts_of(field, inside[last])))
        elif isinstance(inside, Mapping) and "." in field.inner:
            filled_fields.append(replace(field, values=texts_of(field, field.own_default)))
        else:
            filled_fields.append(field)
    return filled_fields


def with_form_texts(fields: Sequence[Field], form: Mapping[str, Sequence[str]]) -> list[Field]:
    """Return the fields as a browser sent them. Fields that it did not send are empty."""
    return [replace(field, values=tuple(_split(field, form.get(field.key, ())))) for field in fields]


def _split(field: Field, texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        parts = [text] if field.type == "json" or field.choices else text.split(",")
        yield from (part.strip() for part in parts if part.strip())


def _parsed(field: Field, text: str) -> Any:
    if field.type == "string":
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    if field.type == "json":
        return value
    try:
        is_finite = isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every field's bound
        return text
    return value if is_finite else text


def text_problems(fields: Sequence[Field], options: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the problems of the texts themselves: invalid JSON, and invalid labels."""
    wrong_texts = []
    for field in fields:
        for text in field.values if field.type == "json" else ():
            try:
                parse_json(text)
            except ValueError as wrong:
                wrong_texts.append(
                    {"pointer": f"/spec/{field.path.replace('.', '/')}", "detail": f"This is not JSON: {wrong}"}
                )
    try:
        separated.pairs(options["labels"])
    except ValueError as wrong:
        wrong_texts.append({"pointer": "/labels", "detail": str(wrong)})
    return wrong_texts


def body_of(kind: str, fields: Sequence[Field], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `POST /jobs`, or of `POST /sweeps` if a field that takes one value has several."""
    given: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    # An object that differs somewhere is given as a whole, and then its own defaults count.
    whole = {_object_of(field) for field in fields if field.is_changed and "." in field.inner}
    for field in fields:
        default = field.own_default if "." in field.inner and _object_of(field) in whole else field.default
        values = [_parsed(field, text) for text in field.values]
        if not field.is_list and len(values) > 1:
            grid[field.path] = values
        elif field.values == texts_of(field, default):
            continue
        elif values:
            given[field.path] = values if field.is_list else values[0]
        elif field.is_nullable:
            given[field.path] = None
    spec = with_paths({"kind": kind}, given)
    if grid:
        return {"base": spec, "grid": grid, **options}
    return {"spec": spec, **options}


def _object_of(field: Field) -> tuple[str, str]:
    return field.side, field.inner.partition(".")[0]


def number_of_jobs(body: Mapping[str, Any]) -> int:
    return math.prod(len(values) for values in body.get("grid", {}).values())


def options_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the options beside the spec that are filled in; labels that `problems` refuses are left out."""
    options: dict[str, Any] = {}
    if texts["name"]:
        options["name"] = texts["name"]
    with contextlib.suppress(ValueError):
        if labels := dict(separated.pairs(texts["labels"])):
            options["labels"] = labels
    for name in ("priority", "timeout_s", "max_attempts"):
        if texts[name] and texts[name] != str(USUAL.get(name)):
            options[name] = _parsed(Field(name, "number", ""), texts[name])
    return options


def options_from_form(form: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the text in the field of each option, as a browser sent it."""
    return {name: form.get(OPTIONS + name, [""])[0].strip() for name in OPTION_NAMES}


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the options' fields; default values are left empty."""
    labels = separated.joined(f"{key}={value}" for key, value in (options.get("labels") or {}).items())
    others = {name: options.get(name) for name in OPTION_NAMES}
    plain = {name: "" if value in (None, USUAL.get(name)) else str(value) for name, value in others.items()}
    return {**plain, "labels": labels}


def with_errors(
    fields: Sequence[Field], errors: Sequence[Mapping[str, str]]
) -> tuple[list[Field], dict[str, list[str]], list[str]]:
    """Put problems at the fields that their pointers name; returns the fields, the problems of options by name, and
    those that belong to neither."""
    by_path: dict[str, list[str]] = {field.path: [] for field in fields}
    options: dict[str, list[str]] = {}
    others: list[str] = []
    for error in errors:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in error["pointer"].split("/")[1:]]
        own = next((path for size in range(len(parts), 1, -1) if (path := ".".join(parts[1:size])) in by_path), None)
        detail = error["detail"]
        if parts and parts[0] in ("spec", "base", "grid") and own is not None:
            if detail not in by_path[own]:
                by_path[own].append(detail)
        elif parts and parts[0] in OPTION_NAMES:
            options.setdefault(parts[0], []).append(detail)
        else:
            others.append(f"{error['pointer']}: {detail}" if error["pointer"] else detail)
    return [replace(field, errors=tuple(by_path[field.path])) for field in fields], options, others


def groups_of(fields: Sequence[Field]) -> tuple[list[tuple[str, list[Field]]], list[tuple[str, list[Field]]]]:
    """Return the fields that a form shows, and those that it folds, each by the object that they belong to ("")."""

    def grouped(own: Sequence[Field]) -> list[tuple[str, list[Field]]]:
        groups: dict[str, list[Field]] = {}
        for field in own:
            groups.setdefault(field.inner.rpartition(".")[0], []).append(field)
        return list(groups.items())

    # Of an object's fields, those that the defaults set come first: a model's size before its single widths.
    first = [
        field
        for field in fields
        # A newcomer does not need empty objects, such as code, either.
        if ("." not in field.inner or field.default != field.own_default) and field.default not in (None, {})
    ]
    shown = {field.inner for field in first[:FIRST_FIELDS]} | {"device"}
    return (
        grouped([field for field in fields if field.inner in shown]),
        grouped([field for field in fields if field.inner not in shown]),
    )


@dataclass(frozen=True)
class Section:
    """The fields of one spec in a form: those that it shows, and those that it folds, by their object ("")."""

    side: str
    shown: list[tuple[str, list[Field]]]
    folded: list[tuple[str, list[Field]]]

    @property
    def is_unfolded(self) -> bool:
        return any(field.is_changed or field.errors for _, group in self.folded for field in group)


def sections_of(fields: Sequence[Field]) -> list[Section]:
    """Return the sides of a form, and its own fields last; hidden fields are left out."""
    by_side: dict[str, list[Field]] = {}
    for field in fields:
        if field.widget != "hidden":
            by_side.setdefault(field.side, []).append(field)
    sides = [*filter(None, by_side), *([""] if "" in by_side else [])]
    return [Section(side, *groups_of(by_side[side])) for side in sides]


def side_kinds(of: str) -> list[str]:
    """Return the kinds of the specs that one of this kind holds, in the order of `kinds`; none if it holds none."""
    held = KINDS[of].held_kinds if KINDS[of].holds_specs else ()
    return [kind for kind in kinds() if not KINDS[kind].holds_specs and (held is None or kind in held)]


def kinds() -> list[str]:
    """Return the kinds in the order useful to newcomers: those with a training step first."""
    order = ("benchmark", "attention", "profile", "memory", "compare", "ddp", "collective", "kernel")
    return [kind for kind in order if kind in KINDS] + [kind for kind in sorted(KINDS) if kind not in order]
