"""`flopwatch why`: what a step waits for, and what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import arguments
from app.cli.commands.jobs import wait_for_answer
from app.cli.common import TEXT, AsJson, AsText, Code, Fields, WaitAtMost, command

if TYPE_CHECKING:
    from flopwatch import Flopwatch

OF_A_STEP = ("benchmark", "profile", "memory")
"""Kinds whose fields are, but for their own, those of a benchmark."""


@command
def why(
    server: Flopwatch,
    what: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION|KIND|JOB", help="A step of your own, a kind, or a job's step.")
    ],
    fields: Fields = None,
    *,
    code: Code = None,
    budget_s: Annotated[int, typer.Option(metavar="SECONDS", help="About how long it may take.")] = 300,
    change: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Try this change, and no others; may be repeated.")
    ] = None,
    wait_at_most: WaitAtMost = None,
    as_json: AsJson = False,
    output_format: AsText = TEXT,
) -> None:
    """Find what a step waits for, and measure what helps: the causes by line, then each change in turns with the step
    as it is."""
    own = what if ":" in what else None
    under: dict[str, Any] = _step_of(server, int(what)) if what.isdecimal() else {}
    kind = under.pop("kind", "benchmark" if own or what.isdecimal() else what)
    step = arguments.parse_spec(kind, fields or [], preset=under, lists=frozenset())
    spec = {"kind": "diagnosis", "step": step, "budget_s": budget_s, **({"changes": change} if change else {})}
    job = server.submit(spec, step=own, code=code)
    wait_for_answer(server, job, at_most=wait_at_most, as_json=as_json, brief=output_format == "brief")


def _step_of(server: Flopwatch, job_id: int) -> dict[str, Any]:
    """Return a job's step as the spec of a benchmark; of another kind the spec itself, which the server refuses."""
    spec: dict[str, Any] = server.job(job_id)["spec"]
    if spec["kind"] == "diagnosis":
        return dict(spec["step"])
    if spec["kind"] not in OF_A_STEP:
        return dict(spec)
    known = next(one["schema"]["properties"] for one in server.specs() if one["kind"] == "benchmark")
    return {
        **{name: value for name, value in spec.items() if name in known and name != "replicates"},
        "kind": "benchmark",
    }
