"""Reads a job's spec from the command line: a kind or a file, a preset, and key=value; with or without a server."""

import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from app.cli.arguments import OWN_CODE, PYTHON_FILE, list_fields, parse_spec
from app.cli.terminal import fail
from flopwatch.own_code import OwnCode, put_into
from flopwatch.spelling import fields as spec_fields


def chosen(
    specs: Sequence[Mapping[str, Any]], source: str, preset: str | None
) -> tuple[Any, dict[str, Any], frozenset[str]]:
    """Return the kind that a command names by `source`, a kind or a file with a spec; the fields that it starts from;
    and which of its fields are lists. Raises ClientError for an unknown preset."""
    from flopwatch.queries import preset_of

    if is_file(source):
        under = read_file(source, preset)
        kind = under.pop("kind", None)
    else:  # if the kind is unknown, the submission will say so
        kind, under = source, {} if preset is None else preset_of(specs, source, preset)
    return kind, under, next((list_fields(spec["schema"]) for spec in specs if spec["kind"] == kind), frozenset())


def local(
    source: str, fields: list[str], preset: str | None, code: Mapping[str, str | None], folder: Path | None = None
) -> tuple[str, list[OwnCode]]:
    """Return a job's spec as JSON, checked without a server, and the files of the user's own code. If the spec is not
    valid, print the server's message and exit with 2."""
    from pydantic import ValidationError

    from app.api.pointers import describe, pointer, sent_location
    from app.specs import SpecBase, spec_adapter
    from flopwatch import ClientError

    specs = local_specs()
    try:
        kind, under, lists = chosen(specs, source, preset)
        spec = parse_spec(kind, fields, preset=under, lists=lists)
        files = put_into(spec, specs, code, folder)
    except ClientError as error:
        fail(str(error), 2)
    except ValueError as error:
        fail(f"{error}.", 2)
    text = json.dumps(spec)
    try:
        spec_adapter.validate_json(text)
    except ValidationError as error:
        wrong = [
            f"  {pointer(sent_location(problem, spec, ())) or 'the whole'}: {describe(problem, SpecBase)}"
            for problem in error.errors(include_url=False)
        ]
        fail("\n".join(["The spec is not valid", *dict.fromkeys(wrong)]), 2)
    return text, files


def paths_of(name: str, words: Iterable[str]) -> list[str]:
    """Return the dotted paths of the fields with this name, of the kind that is one of a command's words; of any kind
    if there is none."""
    from app.specs import KINDS

    kinds = [word for word in words if word in KINDS] or KINDS
    paths = [path for kind in kinds for path, _ in spec_fields(KINDS[kind].example().model_dump(mode="json"))]
    return list(dict.fromkeys(path for path in paths if name in (path, path.rpartition(".")[2])))


@functools.cache
def local_specs() -> list[dict[str, Any]]:
    """Return the specs of this installation, as `GET /specs` does while no worker has registered. Callers must not
    change them."""
    from app.specs import KINDS

    return [
        {
            "kind": kind,
            "description": (spec.__doc__ or "").strip(),
            "schema": spec.model_json_schema(),
            "presets": spec.presets,
        }
        for kind, spec in sorted(KINDS.items())
    ]


def is_file(source: str) -> bool:
    """Return True for a text that cannot be the name of a kind: a path, or - for standard input."""
    return not re.fullmatch(r"\w+", source)


def read_file(source: str, preset: str | None) -> dict[str, Any]:
    """Read a spec from a file, or from standard input ("-"); raises BadParameter, which names the file."""
    if preset is not None:
        raise typer.BadParameter("a preset goes with a kind; a file has fields of its own", param_hint="--preset")
    if PYTHON_FILE.search(source):
        raise typer.BadParameter(f"{source}: a kind or a file of JSON comes first; {OWN_CODE}")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        spec = json.loads(text)
    except OSError as error:
        cure = f"; fields follow a kind: benchmark {source}" if "=" in source else "; no kind has such a name, either"
        raise typer.BadParameter(f"{source}: {error.strerror}{cure}") from error
    except ValueError as error:
        raise typer.BadParameter(f"{source}: this is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise typer.BadParameter(f"{source}: a spec is a JSON object")
    if "spec" in spec and "kind" not in spec:
        raise typer.BadParameter(
            f"{source}: this is the body of a job; give only what stands under its key spec, and the rest as options"
        )
    return spec
