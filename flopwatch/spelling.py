"""Writes a submission as people would type it: a command of flopwatch, and one of curl. Standard library only."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flopwatch.text.values import parse_value


def arguments(spec: Mapping[str, Any]) -> list[str]:
    """Return a spec's fields as the key=value arguments of `flopwatch submit`."""
    return [f"{path}={argument(value)}" for path, value in fields(spec)]


def fields(spec: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a spec's fields by their dotted paths, as commands take them; its kind is left out."""
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            yield from fields(value, f"{at}{name}.")
        elif at or name != "kind":
            yield f"{at}{name}", value


def sweep_fields(base: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the key=value arguments of `flopwatch sweep`: those of the grid first, then those that all jobs share."""
    axes = [f"{path}={','.join(map(_entry, values))}" for path, values in grid.items()]
    return [*axes, *(f"{path}={_entry(value)}" for path, value in fields(base))]


def command(body: Mapping[str, Any]) -> str:
    """Return the command that submits the body of `POST /jobs` or `POST /sweeps`."""
    base = body.get("spec") or body.get("base") or {}
    kind = str(base.get("kind", ""))
    script = base.get("script_code") or {}
    if script.get("file") and "grid" not in body:
        given = [f"--{name}={base[name]}" for name in ("precision", "device") if name in base]
        words = ["run-script", script["file"], *given, *_options(body)]
        return shlex.join(
            ["flopwatch", *words, *(["--", *of] if (of := shlex.split(base.get("arguments", ""))) else [])]
        )
    base, code = _without_code(base)
    words = ["sweep", *sweep_fields(base, body["grid"])] if "grid" in body else ["submit", *arguments(base)]
    words.insert(1, kind)
    return shlex.join(["flopwatch", *words, *code, *_options(body)])


def _without_code(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a spec without the uploaded files that options name, and these options. In a spec that contains specs,
    they are the candidate's."""
    if isinstance(spec.get("candidate"), Mapping):
        candidate, options = _without_code(spec["candidate"])
        return {**spec, "candidate": candidate}, options
    options = []
    for field, value in spec.items():
        if field in _CODE and _is_file(value):
            option = "--implementation" if spec.get("kind") in _IMPLEMENTED else _CODE[field]
            options += [option, f"{value['file']}:{value['function']}"]
    return {name: value for name, value in spec.items() if not (name in _CODE and _is_file(value))}, options


_CODE = {"step_code": "--step", "code": "--model", "attention_code": "--implementation"}
"""The option that names the file of each field of code."""
_IMPLEMENTED = ("attention", "kernel")
"""The kinds whose `code` is an implementation."""


def _is_file(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("file"))


def curl(body: Mapping[str, Any], url: str) -> str:
    """Return the same request as a command of curl."""
    route = "/sweeps" if "grid" in body else "/jobs"
    text = json.dumps(body, ensure_ascii=False)
    return shlex.join(["curl", "--json", text, url.rstrip("/") + route])


def _options(body: Mapping[str, Any]) -> Iterator[str]:
    if body.get("name"):
        yield from ("--name", body["name"])
    for key, value in (body.get("labels") or {}).items():
        yield from ("--label", f"{key}={value}")
    if body.get("priority"):
        yield f"--priority={body['priority']}"
    if body.get("timeout_s") is not None:
        yield from ("--timeout-s", str(body["timeout_s"]))
    if body.get("max_attempts") not in (None, 2):
        yield from ("--max-attempts", str(body["max_attempts"]))
    if body.get("notify_url"):
        yield from ("--notify-url", body["notify_url"])


def argument(value: Any) -> str:
    """Write a field's value. A list of one needs no brackets, since the command knows which fields are lists."""
    if isinstance(value, list) and value and all(_is_plain(item) for item in value):
        return ",".join(map(_text, value))
    return _text(value)


def _entry(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(value)
    return _text(value) if _is_plain(value) else json.dumps(value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, list | Mapping) and not (
        isinstance(value, str) and any(mark in value for mark in ",[]")
    )


def _text(value: Any) -> str:
    """Write a text unchanged, unless the command would parse it as something else; write other values as JSON."""
    return value if isinstance(value, str) and parse_value(value) == value else json.dumps(value)
