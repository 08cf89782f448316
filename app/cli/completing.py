"""Completions for the shell's Tab key: kinds, presets, fields and their values, and the ids of jobs and sweeps.

`flopwatch --install-completion` sets it up. They come from the server, if it answers quickly; otherwise from the specs
of this installation, without ids. Nothing here may print or raise, since the shell would show that in the middle of the
user's line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from app.cli.arguments import places

if TYPE_CHECKING:
    from flopwatch import Flopwatch

T = TypeVar("T")

ANSWER_S = 1.0
"""Seconds that the server may take, since somebody waits at the keyboard."""
OFFERED_JOBS = 50
THE_LINE = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Variables in which shells pass the command line."""


def kinds(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer kinds, each with the first line of its description."""
    return [
        (spec["kind"], spec["description"].partition("\n")[0])
        for spec in _specs(ctx)
        if spec["kind"].startswith(incomplete)
    ]


def presets(ctx: typer.Context, incomplete: str) -> list[str]:
    return [name for name in _spec_on(ctx).get("presets", {}) if name.startswith(incomplete)]


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


def job_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer the newest jobs, each with its kind and state."""
    jobs = _asked(ctx, lambda server: server.list_jobs(limit=OFFERED_JOBS))
    return _ids(jobs, incomplete, lambda job: f"{job['kind']}, {job['state']}")


def sweep_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer the newest sweeps, each with its kind and number of jobs."""
    sweeps = _asked(ctx, lambda server: server.list_sweeps(OFFERED_JOBS))
    return _ids(sweeps, incomplete, lambda sweep: f"{sweep['base'].get('kind')}, {sum(sweep['counts'].values())} jobs")


def file_names(ctx: typer.Context, incomplete: str) -> list[str]:
    job_id = str(ctx.params.get("job_id"))
    files = _asked(ctx, lambda server: server.list_files(int(job_id))) if job_id.isdecimal() else None
    return [file["name"] for file in files or () if file["name"].startswith(incomplete)]


def job_states(incomplete: str) -> list[str]:
    from app.states import JOB_STATES

    return [state for state in JOB_STATES if state.startswith(incomplete)]


def _ids(
    entries: Sequence[Mapping[str, Any]] | None, incomplete: str, describe: Callable[[Mapping[str, Any]], str]
) -> list[tuple[str, str]]:
    return [(str(entry["id"]), describe(entry)) for entry in entries or () if str(entry["id"]).startswith(incomplete)]


def _asked(ctx: typer.Context, ask: Callable[[Flopwatch], T]) -> T | None:
    """Ask the server that the line or the environment names; returns None if none answers in time."""
    from flopwatch import ClientError, Flopwatch

    options = {**ctx.find_root().params, **{name: value for name, value in ctx.params.items() if value is not None}}
    try:
        with Flopwatch(options.get("url"), data_dir=options.get("data_dir"), timeout_s=ANSWER_S) as server:
            return ask(server)
    except ClientError:
        return None


def _specs(ctx: typer.Context) -> list[dict[str, Any]]:
    if (specs := _asked(ctx, lambda server: server.specs())) is not None:
        return specs
    from app.cli.specs import local_specs

    return local_specs()


def _spec_on(ctx: typer.Context) -> dict[str, Any]:
    """Return the description of the kind on the line, or of the kind of the job whose id is on it; empty if there is
    neither."""
    named = {ctx.params.get("kind"), ctx.params.get("source")} - {None}
    if (job_id := str(ctx.params.get("job_id"))).isdecimal():
        named = {_asked(ctx, lambda server: server.job(int(job_id)).kind)}
    # After an option without a value the line is not parsed, so any word may be the kind.
    words = named or {word for name in THE_LINE for word in os.environ.get(name, "").split()}
    return next((spec for spec in _specs(ctx) if spec["kind"] in words), {})


def _paths(schema: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(path for path, _ in places(schema) if path != "kind"))


def _values(schema: Mapping[str, Any], key: str) -> list[str]:
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
