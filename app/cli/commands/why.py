"""`flopwatch why`: what a step waits for, and what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import arguments
from app.cli.commands.jobs import wait_for_answer
from app.cli.common import TEXT, AsJson, AsText, Code, Fields, TimeLimit, WaitAtMost, command
from app.cli.terminal import echo

if TYPE_CHECKING:
    from flopwatch import Flopwatch

OF_A_STEP = ("benchmark", "profile", "memory")
"""Kinds whose fields are, but for their own, those of a benchmark."""
OPTIONS = {
    "budget": "--budget-s", "budget_s": "--budget-s", "change": "--change", "changes": "--change",
    "timeout_s": "--timeout-s",
}  # fmt: skip
"""How to give what is of the diagnosis, and not of its step."""


@command
def why(
    server: Flopwatch,
    what: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION|KIND|JOB", help="A step of your own, a kind, or a job's step.")
    ],
    fields: Fields = None,
    *,
    code: Code = None,
    budget_s: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="About how long it may take.", show_default="300")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Try this change, and no others; may be repeated.")
    ] = None,
    timeout_s: TimeLimit = None,
    wait_at_most: WaitAtMost = None,
    as_json: AsJson = False,
    output_format: AsText = TEXT,
) -> None:
    """Find why a step is slow, and what helps: the causes by line, then each change in alternation with the step as it
    is. For a diagnosis that has run, print the answer again, unless something is to change."""
    if what.endswith(".py"):
        raise typer.BadParameter(f"{what} names no function: write {what}:FUNCTION, such as {what}:make_step.")
    for name in (field.partition("=")[0] for field in fields or []):
        if name in OPTIONS:
            raise typer.BadParameter(f"{name} is no field of a step: write {OPTIONS[name]}.")
    known = server.job(int(what)) if what.isdecimal() else None
    anew = bool(fields or change or code or budget_s is not None or timeout_s is not None)
    if known and known["kind"] == "diagnosis" and not anew and known["state"] in ("queued", "running", "succeeded"):
        if known["state"] == "succeeded" and not as_json and output_format != "brief":
            echo(f"Measured before; `flopwatch rerun {what}` measures again.", err=True)
        wait_for_answer(server, known, at_most=wait_at_most, as_json=as_json, brief=output_format == "brief")
        return
    if known and known["kind"] == "diagnosis" and not anew:
        echo(f"Job {what} is {known['state']}: it is measured again.", err=True)
    own = what if ":" in what else None
    under = _step_of(server, known["spec"]) if known else {}
    kind = under.pop("kind", "benchmark" if own else what)
    step = arguments.parse_spec(kind, fields or [], preset=under, lists=frozenset())
    given = {"budget_s": budget_s, "changes": change}
    spec = {"kind": "diagnosis", "step": step, **{name: value for name, value in given.items() if value is not None}}
    job = server.submit(spec, step=own, code=code, **arguments.parse_limit(timeout_s))
    wait_for_answer(server, job, at_most=wait_at_most, as_json=as_json, brief=output_format == "brief")


def _step_of(server: Flopwatch, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a job's step as the spec of a benchmark; of another kind the spec itself, which the server refuses."""
    if spec["kind"] == "diagnosis":
        return dict(spec["step"])
    if spec["kind"] not in OF_A_STEP:
        return dict(spec)
    known = next(one["schema"]["properties"] for one in server.specs() if one["kind"] == "benchmark")
    return {
        **{name: value for name, value in spec.items() if name in known and name != "replicates"},
        "kind": "benchmark",
    }
