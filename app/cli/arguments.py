"""From key=value arguments to JSON: a value is JSON where it parses as such, else text; dotted keys nest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer


def split_pair(argument: str) -> tuple[str, str]:
    """The two sides of "key=value"."""
    key, equals, value = argument.partition("=")
    if not equals or not all(key.split(".")):
        raise typer.BadParameter(f"{argument!r} is not of the form key=value.")
    return key, value


def parse_value(text: str) -> Any:
    """128 → number, true → boolean, [1, 2] → list, tiny → text."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def parse_values(text: str) -> list[Any]:
    """A list of values: "128,256", "tiny,small" or "[1, 2],[3]"."""
    try:
        values: list[Any] = json.loads(f"[{text}]", parse_constant=_no_constant)
    except ValueError:
        return [parse_value(part) for part in text.split(",")]
    return values or [text]


def _no_constant(name: str) -> Any:
    # JSON has no NaN and no Infinity, whatever Python reads.
    raise ValueError(name)


def set_nested(target: dict[str, Any], key: str, value: Any) -> None:
    """Set "model.size" as {"model": {"size": value}}."""
    *parents, last = key.split(".")
    for parent in parents:
        inside = target.setdefault(parent, {})
        if not isinstance(inside, dict):
            raise typer.BadParameter(f"{key}: {parent} has a value already, so nothing can be set inside it.")
        target = inside
    target[last] = value


def parse_spec(kind: str, arguments: Iterable[str]) -> dict[str, Any]:
    """A job's spec from a kind and key=value arguments."""
    spec: dict[str, Any] = {"kind": kind}
    for argument in arguments:
        key, text = split_pair(argument)
        set_nested(spec, key, parse_value(text))
    return spec


def parse_sweep(kind: str, arguments: Iterable[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """A sweep's base and grid: keys with several values make the grid."""
    base: dict[str, Any] = {"kind": kind}
    grid: dict[str, list[Any]] = {}
    for argument in arguments:
        key, text = split_pair(argument)
        values = parse_values(text)
        if len(values) == 1:
            set_nested(base, key, values[0])
        else:
            grid[key] = values
    if not grid:
        raise typer.BadParameter("No key has several values (key=v1,v2); use `flopwatch submit` for a single job.")
    return base, grid


def parse_labels(arguments: Iterable[str]) -> dict[str, str]:
    """Labels, as key=value."""
    return dict(split_pair(argument) for argument in arguments)


def parse_point(argument: str) -> dict[str, Any]:
    """A partial point to exclude: "model.size=xl,context_length=512"."""
    return {key: parse_value(text) for key, text in (split_pair(part) for part in argument.split(","))}
