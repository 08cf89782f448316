"""Completions for the shell's Tab key: kinds, presets, fields and their values, from the specs of this installation.

`flopwatch --install-completion` sets it up. Nothing here may print or raise, since the shell would show that in the
middle of the user's line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from app.cli.arguments import places
from app.cli.specs import local_specs

THE_LINE = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Variables in which shells pass the command line."""


def kinds() -> list[tuple[str, str]]:
    """Offer kinds, each with the first line of its description."""
    return [(spec["kind"], spec["description"].partition("\n")[0]) for spec in local_specs()]


def presets(ctx: typer.Context) -> list[str]:
    """Offer the presets of the kind on the line."""
    return list(_spec_on(ctx).get("presets", {}))


def fields(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer "key=" for the fields of the kind on the line, or the values of the field that is being written.

    bash ends a word at "=", so there the key, or the key and "=", are separate preceding words.
    """
    schema = _spec_on(ctx).get("schema", {})
    if "=" in incomplete.lstrip("="):
        key, _, value = incomplete.partition("=")
        return [f"{key}={text}" for text in _continued(value, _values(schema, key))]
    before = [word for word in ctx.params.get("fields") or () if word]
    if not incomplete and before and before[-1] in _paths(schema):
        return _values(schema, before[-1])  # the word is "=", which is taken off
    if len(before) >= 2 and before[-1] == "=":
        return _continued(incomplete, _values(schema, before[-2]))
    return [f"{path}=" for path in _paths(schema) if path.startswith(incomplete)]


def _spec_on(ctx: typer.Context) -> dict[str, Any]:
    """Return the description of the kind on the line; empty if there is none."""
    named = {ctx.params.get("kind"), ctx.params.get("source")} - {None}
    # After an option without a value the line is not parsed, so any word may be the kind.
    words = named or {word for name in THE_LINE for word in os.environ.get(name, "").split()}
    return next((spec for spec in local_specs() if spec["kind"] in words), {})


def _paths(schema: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(path for path, _ in places(schema) if path != "kind"))


def _values(schema: Mapping[str, Any], key: str) -> list[str]:
    """Return the values that a field can have, as far as its schema lists them."""
    values: list[Any] = []

    def gather(place: Mapping[str, Any]) -> None:
        values.extend(place.get("enum", ()))
        values.extend([place["const"]] if "const" in place else ())
        values.extend([True, False] if place.get("type") == "boolean" else ())
        for part in (*place.get("anyOf", ()), *([place["items"]] if isinstance(place.get("items"), Mapping) else ())):
            gather(part)

    for path, place in places(schema):
        if path == key:
            gather(place)
    return list(dict.fromkeys(value if isinstance(value, str) else json.dumps(value) for value in values))


def _continued(text: str, values: Sequence[str]) -> list[str]:
    """Return the completions of a text; of several values separated by commas, the last one is being written."""
    before, comma, last = text.rpartition(",")
    return [f"{before}{comma}{value}" for value in values if value.startswith(last)]
