"""Commands that submit jobs, watch them and end them: submit, sweep, jobs, show, logs, cancel, delete, retry."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from app.cli import arguments
from app.cli.processes import fail
from app.cli.terminal import echo, raw

if TYPE_CHECKING:
    from app.client import Flopwatch

P = ParamSpec("P")
R = TypeVar("R")

MAX_LOOKED_AT = 500
"""Number of a sweep's jobs that the command asks why they wait; the others mostly wait for the same reason."""

BULK_TIMEOUT_S = 3600.0
"""The server changes thousands of jobs in slices, and waits for other writers in between."""

JobIds = Annotated[list[int] | None, typer.Argument(metavar="[ID…]", help="The jobs' ids.")]
OfKind = Annotated[str | None, typer.Option("--kind", help="All jobs of this kind.")]
OfSweep = Annotated[int | None, typer.Option("--sweep", metavar="ID", help="All jobs of this sweep.")]
WithLabel = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="All jobs with this label; may be repeated.")
]
JobId = Annotated[int, typer.Argument(metavar="ID", help="The job's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer.")]
AsItIs = Annotated[
    bool,
    typer.Option("--raw", help="Send control characters to the terminal, which obeys them; not for strangers' jobs."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done; exit code 0 only when it succeeded.")]
Name = Annotated[str | None, typer.Option(help="A name, for people.")]
Label = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label; may be repeated.")]
Priority = Annotated[int, typer.Option(help="Higher runs first.")]
TimeoutS = Annotated[
    str | None,
    typer.Option(metavar="SECONDS|none", help="End the job after this time; else after the server's default."),
]
MaxAttempts = Annotated[int, typer.Option(help="How often it may be started when workers are lost.")]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Start from a preset; `flopwatch specs KIND` lists them.")
]
Key = Annotated[str | None, typer.Option("--idempotency-key", help="Submitting again with this key changes nothing.")]


def with_server(command: Callable[Concatenate[Flopwatch, P], R]) -> Callable[P, R]:
    """Give the command a connection to the server; a problem of the server becomes a message and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from app.client import ClientError, Flopwatch

        try:
            with Flopwatch() as server:
                return command(server, *args, **kwargs)
        except ClientError as error:
            fail(str(error))

    # Typer reads the parameters off the function, and must not see the first.
    signature = inspect.signature(command, eval_str=True, locals={"Flopwatch": object})
    _, *parameters = signature.parameters.values()
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


@with_server
def submit(
    server: Flopwatch,
    kind: Annotated[str, typer.Argument(help="The kind of job; `flopwatch specs` lists them.")],
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="The spec's fields; model.size=tiny nests.")
    ] = None,
    *,
    preset: Preset = None,
    wait: Wait = False,
    as_json: AsJson = False,
    name: Name = None,
    label: Label = None,
    priority: Priority = 0,
    timeout_s: TimeoutS = None,
    max_attempts: MaxAttempts = 2,
    unique_key: Annotated[str | None, typer.Option(help="Refused while another job with it is queued or runs.")] = None,
    idempotency_key: Key = None,
) -> None:
    """Submit one job."""
    from app.cli.output import print_job, print_json, print_results, progress_display

    options = _options(name, label, priority, timeout_s, max_attempts)
    chosen, lists = _described(server, kind, preset)
    spec = arguments.parse_spec(kind, fields or [], preset=chosen, lists=lists)
    body = {"spec": spec, **options, "unique_key": unique_key}
    job = server.send("POST", "/jobs", body=body, headers=_idempotency(idempotency_key)).json()
    if not as_json:
        echo(f"job {job['id']} {job['state']}: {server.url}{job['links']['ui']}", err=wait)
    if job["waiting"] is not None:
        echo(f"job {job['id']} waits: {job['waiting']}", err=True)
    if wait:
        goes_on = f"job {job['id']} goes on; `flopwatch cancel {job['id']}` ends it"
        with _going_on_when_interrupted(goes_on), progress_display() as show:
            job = server.wait(job, show=show, check=False)
    if as_json:
        print_json(job)
    elif wait:
        print_job(job)
        print_results(server, job)
    if wait and job["state"] != "succeeded":
        raise typer.Exit(1)


@with_server
def sweep(
    server: Flopwatch,
    kind: Annotated[str, typer.Argument(help="The kind of job.")],
    fields: Annotated[
        list[str], typer.Argument(metavar="KEY=V1,V2…", help="Fields; those with several values make the grid.")
    ],
    *,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,…", help="Leave these combinations out; may be repeated.")
    ] = None,
    preset: Preset = None,
    wait: Wait = False,
    as_json: AsJson = False,
    name: Name = None,
    label: Label = None,
    priority: Priority = 0,
    timeout_s: TimeoutS = None,
    max_attempts: MaxAttempts = 2,
    idempotency_key: Key = None,
) -> None:
    """Submit one job per combination of values."""
    from app.cli.output import print_json, progress_display

    chosen, lists = _described(server, kind, preset)
    base, grid = arguments.parse_sweep(kind, fields, preset=chosen, lists=lists)
    body = {
        "base": base,
        "grid": grid,
        "exclude": [arguments.parse_point(point, lists) for point in exclude or []],
        **_options(name, label, priority, timeout_s, max_attempts),
    }
    made = server.send("POST", "/sweeps", body=body, headers=_idempotency(idempotency_key)).json()
    total = sum(made["counts"].values())
    if not as_json:
        echo(f"sweep {made['id']} with {total} jobs: {server.url}/ui/sweeps/{made['id']}", err=wait)
    _say_what_waits(server, made["id"])
    if wait:
        with _going_on_when_interrupted(f"sweep {made['id']} goes on"), progress_display() as show:
            made = server.wait_for_sweep(made, show=show)
    if as_json:
        print_json(made)
    elif wait:
        echo(server.text("/tables", sweep=made["id"], format="markdown"))
        echo(", ".join(f"{count} {state}" for state, count in made["counts"].items() if count))
    if wait and made["counts"]["succeeded"] != total:
        raise typer.Exit(1)


@with_server
def jobs(
    server: Flopwatch,
    *,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs of this kind.")] = None,
    label: Label = None,
    sweep_id: Annotated[int | None, typer.Option("--sweep", metavar="ID", help="Only jobs of this sweep.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from app.cli.output import print_columns, print_json
    from app.layout import case_text

    labels = [f"{key}:{value}" for key, value in arguments.parse_labels(label or []).items()] or None
    found = server.pages("/jobs", limit, state=state, kind=kind, label=labels, sweep=sweep_id)
    if as_json:
        print_json(found)
        return
    listed = [{**job, "case": case_text(job["summary"])} for job in found]
    keys = ("id", "kind", "state", "case", "name", "labels", "priority", "created_at", "finished_at")
    print_columns(keys, [[job[key] for key in keys] for job in listed])


@with_server
def show(server: Flopwatch, job_id: JobId, *, as_json: AsJson = False, as_it_is: AsItIs = False) -> None:
    """Show a job and its measurements."""
    from app.cli.output import print_job, print_json, print_results

    job = server.get(f"/jobs/{job_id}")
    if as_json:
        print_json(job)
        return
    with raw(as_it_is):
        print_job(job)
        print_results(server, job)


@with_server
def logs(
    server: Flopwatch,
    job_id: JobId,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is done.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt; else of the last.")] = None,
    as_it_is: AsItIs = False,
) -> None:
    """Print a job's output."""
    if attempt is not None and follow:
        raise typer.BadParameter("--follow is for the attempt that runs: leave --attempt out.")
    with raw(as_it_is):
        if not follow or server.get(f"/jobs/{job_id}")["finished_at"]:
            echo(server.text(f"/jobs/{job_id}/logs", attempt=attempt), nl=False)
            return
        for event in server.events(job_id):
            if event.type == "log":
                echo(event.data["text"], nl=False)


@with_server
def cancel(
    server: Flopwatch,
    job_ids: JobIds = None,
    *,
    state: Annotated[str | None, typer.Option(help="All jobs in this state: queued or running.")] = None,
    kind: OfKind = None,
    label: WithLabel = None,
    sweep_id: OfSweep = None,
) -> None:
    """Cancel jobs, queued or running: those named, or all that match every filter.

    One that cannot be cancelled does not keep the others from it.
    """
    chosen = _chosen(job_ids, state, kind, label, sweep_id)
    if chosen is not None:
        done = server.send("POST", "/jobs/cancel", params=chosen, timeout_s=BULK_TIMEOUT_S).json()
        echo(f"jobs cancelled: {done['cancelled']}; being cancelled: {done['requested']}")
        return

    def cancel_one(job_id: int) -> str:
        job = server.send("POST", f"/jobs/{job_id}/cancel").json()
        return "cancelled" if job["state"] == "cancelled" else "is being cancelled"

    _each(job_ids or [], cancel_one)


@with_server
def retry(
    server: Flopwatch, job_ids: Annotated[list[int], typer.Argument(metavar="ID…", help="The jobs' ids.")]
) -> None:
    """Run failed or cancelled jobs again; one that cannot be retried does not keep the others from it."""

    def retry_one(job_id: int) -> str:
        job = server.send("POST", f"/jobs/{job_id}/retry").json()
        return f"queued for attempt {job['attempt'] + 1}"

    _each(job_ids, retry_one)


@with_server
def delete(
    server: Flopwatch,
    job_ids: JobIds = None,
    *,
    state: Annotated[str | None, typer.Option(help="All jobs in this state: succeeded, failed or cancelled.")] = None,
    kind: OfKind = None,
    label: WithLabel = None,
    sweep_id: OfSweep = None,
) -> None:
    """Delete finished jobs with their results and files: those named, or all that match every filter.

    One that cannot be deleted does not keep the others from it.
    """
    chosen = _chosen(job_ids, state, kind, label, sweep_id)
    if chosen is not None:
        done = server.send("DELETE", "/jobs", params=chosen, timeout_s=BULK_TIMEOUT_S).json()
        left = f"; queued or running, so not deleted: {done['unfinished']}" if done["unfinished"] else ""
        echo(f"jobs deleted: {done['deleted']}{left}")
        return

    def delete_one(job_id: int) -> str:
        server.send("DELETE", f"/jobs/{job_id}")
        return "deleted"

    _each(job_ids or [], delete_one)


COMMANDS = (submit, sweep, jobs, show, logs, cancel, delete, retry)


def _chosen(
    job_ids: list[int] | None, state: str | None, kind: str | None, label: list[str] | None, sweep_id: int | None
) -> dict[str, Any] | None:
    """Return the filters as query parameters, or None where jobs are named by their ids."""
    labels = [f"{key}:{value}" for key, value in arguments.parse_labels(label or []).items()]
    filters = {"state": state, "kind": kind, "label": labels or None, "sweep": sweep_id}
    chosen = {name: value for name, value in filters.items() if value is not None}
    if bool(job_ids) == bool(chosen):
        raise typer.BadParameter("give ids, or at least one of --state, --kind, --label and --sweep, and not both")
    return chosen or None


def _each(job_ids: list[int], act: Callable[[int], str]) -> None:
    """Do it to every job, and say what became of it; exit with 1 at the end if the server refused one."""
    from app.client import ClientError

    refused = 0
    for job_id in job_ids:
        try:
            echo(f"job {job_id} {act(job_id)}")
        except ClientError as error:
            refused += 1
            echo(f"error: job {job_id}: {error}", err=True)
    if refused:
        raise typer.Exit(1)


def _described(server: Flopwatch, kind: str, preset: str | None) -> tuple[dict[str, Any], frozenset[str]]:
    """Ask the server about a kind: the fields of the preset, and which fields are lists. Raises ClientError."""
    from app.client import ClientError

    specs = {spec["kind"]: spec for spec in server.get("/specs")["data"]}
    if kind not in specs:
        # The submission will say what is wrong, unless the user named a preset.
        if preset is not None:
            raise ClientError(f"There is no kind {kind!r}; known kinds: {', '.join(specs)}.")
        return {}, frozenset()
    presets = specs[kind]["presets"]
    if preset is not None and preset not in presets:
        known = f"its presets: {', '.join(presets)}" if presets else "it has none"
        raise ClientError(f"Kind {kind} has no preset {preset!r}; {known}.")
    return presets.get(preset, {}), arguments.list_fields(specs[kind]["schema"])


def _say_what_waits(server: Flopwatch, sweep_id: int) -> None:
    """Print why jobs of a sweep cannot start, each reason once."""
    queued = server.pages("/jobs", MAX_LOOKED_AT, state="queued", sweep=sweep_id)
    for reason, count in Counter(job["waiting"] for job in queued if job["waiting"] is not None).items():
        many = f"{count} jobs wait" if count > 1 else "1 job waits"
        echo(f"{many}: {reason}", err=True)


def _options(
    name: str | None, label: list[str] | None, priority: int, timeout_s: str | None, max_attempts: int
) -> dict[str, Any]:
    return {
        "name": name,
        "labels": arguments.parse_labels(label or []),
        "priority": priority,
        "timeout_s": None if timeout_s is None else arguments.parse_timeout(timeout_s),
        "max_attempts": max_attempts,
    }


def _idempotency(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Idempotency-Key": key}


@contextlib.contextmanager
def _going_on_when_interrupted(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        echo(message, err=True)
        raise typer.Exit(130) from None
