"""Turns key=value arguments into JSON: a value is JSON if it parses as such, else text; dotted keys nest."""

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import typer

from flopwatch.text.values import parse_json, parse_value

T = TypeVar("T")
PYTHON_FILE = re.compile(r"\.py(:\w*)?\]?$")
OWN_CODE = "your code goes in by --step, --implementation or --model FILE.py:NAME; a script by `flopwatch run-script`"


def split_pair(argument: str) -> tuple[str, str]:
    """Split "key=value" into its two sides."""
    key, equals, value = argument.partition("=")
    if not equals or not all(key.split(".")):
        cure = f"; {OWN_CODE}" if PYTHON_FILE.search(argument) else ""
        raise typer.BadParameter(f"{argument!r} is not of the form key=value{cure}.")
    return key, value


def _field(argument: str) -> tuple[str, str]:
    """Split a field of a spec; a Python file in place of a name has an option of its own."""
    key, text = split_pair(argument)
    if key.rpartition(".")[2] in ("attention", "implementations") and PYTHON_FILE.search(text):
        raise typer.BadParameter(f"{key} takes names; a file of your own goes in by --implementation FILE.py:FUNCTION.")
    if key == "model" and PYTHON_FILE.search(text):
        raise typer.BadParameter("a model of your own goes in by --model FILE.py:CLASS.")
    return key, text


def parse_values(text: str) -> list[Any]:
    """Parse a list of values: "128,256", "tiny,small" or "[1, 2],[3]"."""
    try:
        values: list[Any] = parse_json(f"[{text}]")
    except ValueError:
        return [parse_value(part) for part in text.split(",")]
    return values or [text]


def set_nested(target: dict[str, Any], key: str, value: Any, *, once: bool = False) -> None:
    """Set "model.size" as {"model": {"size": value}}; with `once`, refuse to replace a value that is set already."""
    *parents, last = key.split(".")
    for parent in parents:
        inside = target.setdefault(parent, {})
        if not isinstance(inside, dict):
            raise typer.BadParameter(f"{key}: {parent} has a value already, so nothing can be set inside it.")
        target = inside
    if once and last in target:
        raise typer.BadParameter(f"{key} is given twice.")
    target[last] = value


def places(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dotted path and the schema of every field, including those of nested specs."""
    definitions = schema.get("$defs", {})

    def walk(place: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if "$ref" in place:
            yield from walk(definitions[place["$ref"].rpartition("/")[2]], path)
            return
        inside = place.get("properties")
        if inside is None and path:
            yield path, place
        for variant in (*place.get("anyOf", ()), *place.get("oneOf", ())):
            if "$ref" in variant:
                yield from walk(variant, path)
        for name, field in (inside or {}).items():
            yield from walk(field, f"{path}.{name}" if path else name)

    yield from walk(schema, "")


def list_fields(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted paths of the fields that are lists, or a list or null, from a spec's JSON Schema."""
    return frozenset(
        path
        for path, place in places(schema)
        if any(one.get("type") == "array" for one in (place, *place.get("anyOf", ()), *place.get("oneOf", ())))
    )


class _Fields:
    """The fields of a spec while it is parsed: a preset's, and those that the user gave, which replace them."""

    def __init__(self, kind: Any, preset: Mapping[str, Any] | None) -> None:
        self.spec: dict[str, Any] = copy.deepcopy(dict(preset or {}))
        self._given: dict[str, Any] = {}
        if kind is not None:
            self.spec["kind"] = self._given["kind"] = kind

    def note(self, key: str, value: Any = None) -> None:
        """Record a key; refuse one that was given before."""
        set_nested(self._given, key, copy.deepcopy(value), once=True)

    def set(self, key: str, value: Any) -> None:
        self.note(key, value)
        set_nested(self.spec, key, value)


def parse_spec(
    kind: Any, arguments: Iterable[str], *, preset: Mapping[str, Any] | None = None, lists: Collection[str] = ()
) -> dict[str, Any]:
    """Make a job's spec from a kind and key=value arguments; the arguments replace the preset's, or a file's, fields.

    A file may lack the kind, or have one of any type: None leaves it out, and the server says what is wrong.

    `lists` are the fields (dotted paths) that are lists: "128,256" is two values for them.
    """
    fields = _Fields(kind, preset)
    for argument in arguments:
        key, text = _field(argument)
        fields.set(key, _as_list(text) if key in lists else parse_value(text))
    return fields.spec


def _as_list(text: str) -> list[Any] | None:
    """Parse all values of a list field: "128,256", "eager,triton" or either in brackets; null is no list."""
    return _entry(text) if text.startswith("[") or parse_value(text) is None else parse_values(text)


def _entry(text: str) -> list[Any] | None:
    """Parse one value of a list field: "eager" is [eager], and "[eager,triton]" needs no quotes."""
    value = parse_value(text)
    if value is None or isinstance(value, list):
        return value
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(part.strip()) for part in text[1:-1].split(",")]
    return [value]


def _entries(text: str) -> list[list[Any] | None]:
    """Parse several values of a list field: "[eager,triton],flex" are two."""
    return [_entry(part) for part in re.split(r",(?![^\[]*\])", text)]


def parse_sweep(
    kind: Any,
    arguments: Iterable[str],
    *,
    preset: Mapping[str, Any] | None = None,
    lists: Collection[str] = (),
    needs_grid: bool = True,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Make a sweep's base and grid: keys with several values make the grid. One value of a list field is a list.

    So "128,256" gives two jobs with the lists [128] and [256], and "[128,256]" gives one value of two entries.
    """
    fields = _Fields(kind, preset)
    grid: dict[str, list[Any]] = {}
    for argument in arguments:
        key, text = _field(argument)
        values = _entries(text) if key in lists else parse_values(text)
        if values in ([], [[]], [""]) and key not in lists:
            raise typer.BadParameter(f"{argument}: {key} has no value; give one, or several (key=v1,v2).")
        if len(values) == 1:
            fields.set(key, values[0])
        else:
            fields.note(key)
            grid[key] = values
    if needs_grid and not grid:
        raise typer.BadParameter(
            "No key has several values (key=v1,v2), and there is no --fit; use `flopwatch submit` for a single job."
            + _as_range(arguments)
        )
    return fields.spec, grid


def _as_range(arguments: Iterable[str]) -> str:
    """Say how to write a list of numbers that was written "context_length=64:128", or with dots; "": none was."""
    for written in arguments:
        if re.fullmatch(r"[^=]+=\d+((:|\.\.)\d+)+", written):
            return f" For {written} write {written.replace('..', ',').replace(':', ',')}."
    return ""


def parse_fit(argument: str, step: int | None) -> dict[str, Any]:
    """Parse the search of `--fit`: "context_length=65536" asks for the largest value that fits, up to 65 536."""
    axis, text = split_pair(argument)
    upto = parse_value(text)
    if isinstance(upto, bool) or not isinstance(upto, int):
        raise typer.BadParameter(f"{text!r} is no whole number; give the largest value to try", param_hint="--fit")
    return {"axis": axis, "upto": upto} | ({} if step is None else {"step": step})


def parse_limit(text: str | None) -> dict[str, Any]:
    """Return a time limit as an option of a submission, or none. The server judges it: `null`, its default limit, goes
    there as a text."""
    return {} if text is None else {"timeout_s": parse_value(text) or text}


def parse_pairs(arguments: Iterable[str]) -> dict[str, str]:
    """Parse pairs, such as labels, given as key=value, each key once."""
    return _once(map(split_pair, arguments))


def parse_point(argument: str, lists: Collection[str] = ()) -> dict[str, Any]:
    """Parse a partial point to exclude: "model.size=xl,context_length=512"."""
    # A comma inside a list is not followed by another key.
    return parse_changes(re.split(r",(?=[^][{}\",=]+=)", argument), lists)


def parse_changes(arguments: Iterable[str], lists: Collection[str] = ()) -> dict[str, Any]:
    """Parse changes of a spec, by their dotted paths; one value of a list field is a list."""
    pairs = map(_field, arguments)
    return _once((key, _as_list(text) if key in lists else parse_value(text)) for key, text in pairs)


def _once(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    values: dict[str, T] = {}
    for key, value in pairs:
        if key in values:
            raise typer.BadParameter(f"{key} is given twice.")
        values[key] = value
    return values
