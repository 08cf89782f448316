"""Commands that submit jobs, watch them and end them: submit, sweep, rerun, run-script, jobs, show, logs, cancel, …"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import arguments, completing
from app.cli.brief import answer, of_job
from app.cli.commands.comparing import Judging, judge
from app.cli.common import (
    GOES_ON,
    TEXT,
    WRONG,
    AsJson,
    AsText,
    BriefJson,
    Code,
    DryRun,
    Fields,
    JobId,
    Label,
    OwnCodeOptions,
    Preset,
    TimeLimit,
    WaitAtMost,
    Waiting,
    check_kind,
    command,
    of_fields,
    of_jobs,
    of_sweep,
)
from app.cli.terminal import echo, echo_line, echo_table, first_of, raw

if TYPE_CHECKING:
    from flopwatch import Flopwatch
    from flopwatch.queries import Description, JobFilter, Question

MAX_LOOKED_AT = 500
"""Number of a sweep's jobs whose reason to wait is printed; the others mostly wait for the same reason."""

JobIds = Annotated[list[int] | None, of_jobs("[ID…]", "The jobs' ids.")]
AsItIs = Annotated[
    bool, typer.Option("--raw", help="Print control characters unescaped (unsafe for untrusted output).")
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="KIND|SPEC.json",
        help="The kind of job, `flopwatch specs` lists them; or a file with a spec, - for standard input.",
        autocompletion=completing.kinds,
    ),
]


@dataclass(frozen=True)
class Filters:
    """Options that choose jobs by what they are, beside their state."""

    kind: Annotated[str | None, typer.Option(help="Jobs of this kind.", autocompletion=completing.kinds)] = None
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Jobs with this label; may be repeated.")
    ] = None
    sweep_id: Annotated[int | None, of_sweep("Jobs of this sweep.")] = None
    submitted_by: Annotated[str | None, typer.Option(metavar="USER", help="Jobs that this user submitted.")] = None
    mine: Annotated[
        bool,
        typer.Option(
            "--mine",
            help="Jobs that you submitted: your token's, or your user's; the pages' form knows only tokens.",
        ),
    ] = False

    def given(self, state: str | None) -> JobFilter:
        """Return these options, and the state, as the client takes them."""
        return {
            "state": state,
            "kind": self.kind,
            "labels": arguments.parse_pairs(self.label or []),
            "sweep": self.sweep_id,
            "submitted_by": self.submitted_by,
            "mine": self.mine,
        }


@dataclass(frozen=True)
class Described:
    """Options that say what a submission is."""

    name: Annotated[str | None, typer.Option(help="Display name.")] = None
    label: Label = None

    def given(self) -> dict[str, Any]:
        """Return these options as the client takes them."""
        given = {**vars(self), "labels": arguments.parse_pairs(self.label or [])}
        given |= arguments.parse_limit(given.get("timeout_s"))
        return {name: value for name, value in given.items() if name != "label"}


@dataclass(frozen=True)
class Queued(Described):
    """Options that say how a submission waits and runs, too."""

    priority: Annotated[int, typer.Option(help="Higher runs first.")] = 0
    timeout_s: TimeLimit = None


@dataclass(frozen=True)
class Submission(Queued):
    """All options of a submission; those of `flopwatch.queries.SubmissionOptions`."""

    max_attempts: Annotated[int, typer.Option(help="Maximum number of starts if workers are lost.")] = 2
    notify_url: Annotated[
        str | None, typer.Option(help="URL that gets a signed webhook when the job ends.", metavar="URL")
    ] = None


@command
def submit(
    server: Flopwatch,
    source: Source,
    fields: Fields = None,
    *,
    preset: Preset = None,
    own_code: OwnCodeOptions,
    waiting: Waiting,
    submission: Submission,
    unique_key: Annotated[
        str | None, typer.Option(help="Refuse while another job with this key is unfinished.")
    ] = None,
    dry_run: DryRun = False,
    output_format: AsText = TEXT,
) -> None:
    """Submit one job."""
    from app.cli.output import print_dry_run
    from app.cli.specs import chosen

    if waiting.statistic is not None and output_format == "brief":
        raise typer.BadParameter("is of a table; --format brief prints none", param_hint="--statistic")
    options = submission.given()
    kind, under, lists = chosen(server.specs(), source, preset)
    spec = arguments.parse_spec(kind, fields or [], preset=under, lists=lists)
    job = server.submit(spec, **options, **vars(own_code), unique_key=unique_key, dry_run=dry_run)
    if dry_run:
        if not waiting.as_json:
            _tell_without_effect(job["without_effect"], job["spec"])
        print_dry_run(server, [job["spec"]], job, searches=False, as_json=waiting.as_json)
        return
    if output_format == "brief":
        waits = waiting.waits
        done, code = _wait_quietly(server, job, at_most=waiting.wait_at_most) if waits else (job, _code_of(job))
        answer(of_job(server, done, code), as_json=waiting.as_json)
    _go_on(server, job, waiting)


def wait_for_answer(
    server: Flopwatch, job: dict[str, Any], *, at_most: float | None, as_json: bool, brief: bool = False
) -> None:
    """Wait for a job and print the tables that answer its kind's question, alone; exits with 1 unless it succeeded."""
    from app.cli.output import print_answers, print_job, print_json, progress_display
    from flopwatch.text.validity import doubts, verdict

    if brief:
        done, exit_code = _wait_quietly(server, job, at_most=at_most)
        answer(of_job(server, done, exit_code), as_json=as_json)
    if not as_json:
        echo(f"job {job['id']} {job['state']}: {server.url}{job['links']['ui']}", err=True)
    if job["state"] != "succeeded":
        with _going_on_when_interrupted(lambda: _how_it_goes_on(server, job["id"])), progress_display() as show:
            job = server.wait(job, timeout_s=at_most, show=show, check=False)
    if as_json:
        print_json(job)
    else:
        print_answers(server, job)
        if _code_of(job):
            print_job(job)
        else:
            for doubt in doubts(job["validity"] or {})[:2]:
                echo_line(f"{verdict(job['validity'])}: {doubt}", err=True)
            table = f"flopwatch table --job {job['id']} --name"
            echo(f"All that was tried: {table} changes; all causes: {table} causes; or the job's page", err=True)
    if code := _code_of(job):
        raise typer.Exit(code)


def _go_on(
    server: Flopwatch,
    job: dict[str, Any],
    waiting: Waiting,
    *,
    follow: bool = False,
    question: Question | None = None,
) -> None:
    """Print the result of a submission and, if asked, wait for the job, and meanwhile print its output; exits with 1
    unless it succeeded, or with WRONG. `question`: of a comparison."""
    from app.cli.output import OutputDisplay, print_answer, print_answers, print_job, print_json, progress_display

    wait, as_json = waiting.waits, waiting.as_json
    if not as_json:
        echo(f"job {job['id']} {job['state']}: {server.url}{job['links']['ui']}", err=wait)
        _tell_without_effect(job["without_effect"], job["spec"])
    if job["waiting"] is not None:
        if not wait:
            echo_line(f"job {job['id']} waits: {job['waiting']}", err=True)
        elif waiting.wait_at_most is None:
            echo_line("Ctrl-C stops waiting; the job keeps running. Use --wait-at-most to limit the wait.", err=True)
    if wait:
        with (
            _going_on_when_interrupted(lambda: _how_it_goes_on(server, job["id"])),
            contextlib.nullcontext(OutputDisplay()) if follow and not as_json else progress_display() as show,
        ):
            job = server.wait(job, timeout_s=waiting.wait_at_most, show=show, check=False)
    if as_json:
        print_json(job)
    elif wait:
        print_answers(server, job)
        print_job(job)
        print_answer(server, job, question, waiting.statistic)
    if wait and (code := _code_of(job)):
        raise typer.Exit(code)


@command
def versus(
    server: Flopwatch,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A file, a folder, or a git revision, such as main.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Like OLD; . is the working tree.")],
    source: Source,
    fields: Fields = None,
    *,
    preset: Preset = None,
    own_code: OwnCodeOptions,
    replicates: Annotated[int, typer.Option(min=1, max=100, help="Fresh processes of each version.")] = 8,
    judging: Judging,
    submission: Described,
    wait_at_most: WaitAtMost = None,
    as_json: BriefJson = False,
    output_format: AsText = TEXT,
) -> None:
    """Compare two versions of your own code, which fresh processes measure in alternation."""
    from app.cli.specs import chosen

    kind, under, lists = chosen(server.specs(), source, preset)
    spec = arguments.parse_spec(kind, fields or [], preset=under, lists=lists)
    job = server.versus(old, new, spec, replicates=replicates, **vars(own_code), **submission.given())
    if as_json or output_format == "brief":
        done, exit_code = _wait_quietly(server, job, at_most=wait_at_most)
        if done["state"] != "succeeded":
            answer(of_job(server, done, exit_code), as_json=as_json)
        answer(judge(server, [job["id"]], None, judging), as_json=as_json)
    _go_on(server, job, Waiting(True, wait_at_most), question=judging.question())
    if judging != Judging():
        judged = judge(server, [job["id"]], None, judging)
        if judging.keep_if is not None:  # else printed with the comparison
            echo_line(judged.sentence or "")
        raise typer.Exit(judged.exit_code)


def _wait_quietly(server: Flopwatch, job: dict[str, Any], *, at_most: float | None) -> tuple[dict[str, Any], int]:
    from flopwatch import WaitTimeout

    try:
        job = server.wait(job, timeout_s=at_most, show=lambda *_: None, check=False)
    except WaitTimeout:
        return server.job(job), GOES_ON
    return job, _code_of(job)


def _code_of(job: dict[str, Any]) -> int:
    if job["state"] != "succeeded":
        return 1 if job["finished_at"] else 0
    return WRONG if (job["validity"] or {}).get("verdict") == "wrong" else 0


@command
def sweep(
    server: Flopwatch,
    source: Source,
    fields: Annotated[
        list[str] | None, of_fields("Fields; those with several values make the grid.", metavar="KEY=V1,V2…")
    ] = None,
    *,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=UPTO",
            help="Search for the largest value up to this one with which the job fits into memory.",
            autocompletion=completing.fields,
        ),
    ] = None,
    multiple_of: Annotated[
        int | None,
        typer.Option(min=1, help="With --fit: the answer is exact to this; 1 if it is small, else 6 % of it."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,…", help="Leave these combinations out; may be repeated.")
    ] = None,
    preset: Preset = None,
    own_code: OwnCodeOptions,
    waiting: Waiting,
    submission: Submission,
    dry_run: DryRun = False,
) -> None:
    """Submit one job per combination of values; with --fit, search for what fits, once per combination."""
    from app.cli.output import print_dry_run
    from app.cli.specs import chosen

    kind, under, lists = chosen(server.specs(), source, preset)
    if fit is None and multiple_of is not None:
        raise typer.BadParameter("is for a search; add --fit KEY=UPTO", param_hint="--multiple-of")
    search = None if fit is None else arguments.parse_fit(fit, multiple_of)
    base, grid = arguments.parse_sweep(kind, fields or [], preset=under, lists=lists, needs_grid=search is None)
    left_out = [arguments.parse_point(point, lists) for point in exclude or []]
    made = server.sweep(
        base,
        grid,
        fit=search,
        exclude=left_out,
        **submission.given(),
        **vars(own_code),
        dry_run=dry_run,
    )
    if dry_run:
        from app.specs._sweep import expand

        if not waiting.as_json:
            _tell_without_effect(made["without_effect"], made["base"])
        points = [point.spec for point in expand(made["base"], grid, left_out)]
        print_dry_run(server, points, made, searches=search is not None, as_json=waiting.as_json)
        return
    _follow_sweep(server, made, waiting)


def _follow_sweep(server: Flopwatch, made: dict[str, Any], waiting: Waiting) -> None:
    """Print the result of a sweep's submission and, if asked, wait for it; exits with 1 unless all jobs succeeded."""
    from app.cli.output import counts_text, print_json, print_searches, progress_display

    wait, as_json = waiting.waits, waiting.as_json
    if not as_json:
        total = sum(made["counts"].values())
        what = f"with {total} jobs"
        if (fit := made["fit"]) is not None:
            what = f"searches by {total} {'job' if total == 1 else 'jobs'} at a time, {_to_try(fit)}"
        echo(f"sweep {made['id']} {what}: {server.url}/ui/sweeps/{made['id']}", err=wait)
    if not wait:
        queued = server.list_jobs(state="queued", sweep=made["id"], limit=MAX_LOOKED_AT)
        for reason, count in Counter(job["waiting"] for job in queued if job["waiting"] is not None).items():
            echo_line(f"{f'{count} jobs wait' if count > 1 else '1 job waits'}: {reason}", err=True)
    else:
        with (
            _going_on_when_interrupted(
                lambda: f"sweep {made['id']} is still running; stop it with `flopwatch cancel --sweep {made['id']}`"
            ),
            progress_display() as show,
        ):
            made = server.wait_for_sweep(made, timeout_s=waiting.wait_at_most, show=show)
    if as_json:
        print_json(made)
    elif wait:
        echo_table(server.table_text(sweep=made["id"], statistic=waiting.statistic))  # type: ignore[arg-type]  # its choices
        echo()
        echo_line(counts_text(made["counts"]))
        print_searches(made)
    is_searched = all(search["state"] == "done" for search in made["searches"] or [])
    if wait and not (sum(made["counts"].values()) == made["counts"]["succeeded"] and is_searched):
        raise typer.Exit(1)
    if wait:
        jobs = server.list_jobs(sweep=made["id"], limit=sum(made["counts"].values()))
        if any((job["validity"] or {}).get("verdict") == "wrong" for job in jobs):
            raise typer.Exit(WRONG)


def _to_try(fit: Mapping[str, Any]) -> str:
    """Write what a search tries: "batch_size 4, 8 … up to 65536, then between what fits and what does not"."""
    first = dict.fromkeys(min(fit["start"] * factor, fit["upto"]) for factor in (1, 2))
    return f"{fit['axis']} {', '.join(map(str, first))} … up to {fit['upto']}, then between what fits and what does not"


@command
def rerun(
    server: Flopwatch,
    job_id: JobId,
    fields: Annotated[list[str] | None, of_fields("Fields to change.")] = None,
    *,
    own_code: OwnCodeOptions,
    waiting: Waiting,
) -> None:
    """Submit a new job with the spec and options of an old one, and new values for some fields."""
    kind = server.job(job_id)["kind"]
    lists = next((arguments.list_fields(spec["schema"]) for spec in server.specs() if spec["kind"] == kind), ())
    changes = arguments.parse_changes(fields or [], lists)
    code = {**vars(own_code), "own_model": own_code.model}
    del code["model"]  # a field of specs
    _go_on(server, server.rerun(job_id, changes, **code), waiting)


@command
def run_script(
    server: Flopwatch,
    script: Annotated[Path, typer.Argument(help="A script that calls flopwatch.measure(step).")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="The script's arguments.")] = None,
    *,
    precision: Annotated[
        str, typer.Option(help="Precision whose peak MFU refers to: fp32, tf32, bf16 or fp16.")
    ] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    code: Code = None,
    wait: Annotated[bool, typer.Option("--wait", hidden=True)] = True,
    wait_at_most: WaitAtMost = None,
    as_json: AsJson = False,
    submission: Queued,
) -> None:
    """Run a training script through the queue, and wait: its output, then what flopwatch.measure(step) measured."""
    spec = server.with_code(
        {"kind": "script", "arguments": shlex.join(words or []), "precision": precision, "device": device},
        script=f"{script}:__main__",
        code=code,
    )
    job = server.submit(spec, **submission.given())
    _go_on(server, job, Waiting(wait, wait_at_most, as_json=as_json), follow=True)


@command
def jobs(
    server: Flopwatch,
    *,
    state: Annotated[
        str | None, typer.Option(help="Only jobs in this state.", autocompletion=completing.job_states)
    ] = None,
    filters: Filters,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Submitted since: 7d, 12h, 90min, 2026-03-01, or a time.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first: what each measures, its verdict, its age, how long it ran, its place in the queue."""
    from app.cli.output import print_job_list, print_json

    listed = first_of(server.list_jobs(**filters.given(state), since=since, limit=limit + 1), limit)
    if not listed:
        check_kind(server, filters.kind)
    if as_json:
        print_json(listed)
    else:
        print_job_list(listed, server.places(listed))


@command
def show(
    server: Flopwatch, job_id: JobId, *, as_json: AsJson = False, as_it_is: AsItIs = False, output_format: AsText = TEXT
) -> None:
    """Show a job and its measurements."""
    from app.cli.output import print_answers, print_job, print_json, print_results

    job = server.job(job_id)
    if output_format == "brief":
        answer(of_job(server, job, _code_of(job)), as_json=as_json)
    if as_json:
        print_json(job)
        return
    with raw(as_it_is):
        print_answers(server, job)
        print_job(job, server.places([job]).get(job_id))
        print_results(server, job)


@command
def label(
    server: Flopwatch,
    job_id: JobId,
    labels: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="Labels to set.")] = None,
    *,
    remove: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Remove a label; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option(help="A new name; '' removes it.")] = None,
    note: Annotated[str | None, typer.Option(help="A note for people; '' removes it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the labels, the name and the note of a job, in any state."""
    from app.cli.output import print_job, print_json

    changes: Description = {}
    if remove:
        for key in sorted({*remove} - server.job(job_id)["labels"].keys()):
            echo(f"job {job_id} has no label {key!r}", err=True)
    if labels or remove:
        changes["labels"] = {**arguments.parse_pairs(labels or []), **dict.fromkeys(remove or [])}
    if name is not None:
        changes["name"] = name or None
    if note is not None:
        changes["note"] = note or None
    if not changes:
        raise typer.BadParameter("give labels, --remove, --name or --note")
    job = server.describe(job_id, **changes)
    if as_json:
        print_json(job)
    else:
        print_job(job)


@command
def logs(
    server: Flopwatch,
    job_id: JobId,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job is done.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt number (default: the last).")] = None,
    as_it_is: AsItIs = False,
) -> None:
    """Print a job's output."""
    if attempt is not None and follow:
        raise typer.BadParameter("--follow is for the attempt that runs: leave --attempt out.")
    with raw(as_it_is):
        if not follow or server.job(job_id)["finished_at"]:
            echo(server.logs(job_id, attempt=attempt), nl=False)
            return
        for event in server.events(job_id):
            if event.type == "log":
                echo(event.data["text"], nl=False)


@command
def cancel(
    server: Flopwatch,
    job_ids: JobIds = None,
    *,
    state: Annotated[str | None, typer.Option(help="All jobs in this state: queued or running.")] = None,
    filters: Filters,
) -> None:
    """Cancel jobs, queued or running: those named, or all that match every filter;
    without the scope admin, only your own.

    If one cannot be cancelled, the others still are.
    """
    chosen = _chosen(job_ids, state, filters)
    if chosen is not None:
        check_kind(server, filters.kind)
        done = server.cancel_jobs(**chosen)
        echo(f"jobs cancelled: {done['cancelled']}; being cancelled: {done['requested']}")
        return

    def cancel_one(job_id: int) -> str:
        return "cancelled" if server.cancel(job_id)["state"] == "cancelled" else "is being cancelled"

    _each(job_ids or [], cancel_one)


@command
def delete(
    server: Flopwatch,
    job_ids: JobIds = None,
    *,
    state: Annotated[str | None, typer.Option(help="All jobs in this state: succeeded, failed or cancelled.")] = None,
    filters: Filters,
) -> None:
    """Delete finished jobs with their results and files: those named, or all that match every filter;
    without the scope admin, only your own.

    If one cannot be deleted, the others still are.
    """
    chosen = _chosen(job_ids, state, filters)
    if chosen is not None:
        check_kind(server, filters.kind)
        done = server.delete_jobs(**chosen)
        not_deleted = f"; queued or running, so not deleted: {done['unfinished']}" if done["unfinished"] else ""
        needed = f"; in baselines, so not deleted: {done['in_baselines']}" if done["in_baselines"] else ""
        echo(f"jobs deleted: {done['deleted']}{not_deleted}{needed}")
        return

    def delete_one(job_id: int) -> str:
        server.delete(job_id)
        return "deleted"

    _each(job_ids or [], delete_one)


@command
def retry(
    server: Flopwatch,
    job_ids: JobIds = None,
    *,
    sweep_id: Annotated[int | None, of_sweep("What has no result in this sweep, with new jobs.")] = None,
) -> None:
    """Run failed or cancelled jobs again; if one cannot be retried, the others still are."""
    if bool(job_ids) == (sweep_id is not None):
        raise typer.BadParameter("give ids, or --sweep, and not both")
    from app.cli.output import counts_text

    if sweep_id is not None:
        counts = server.resume_sweep(sweep_id)["counts"]
        echo(f"sweep {sweep_id}: {counts_text(counts)}")
        return

    _each(job_ids or [], lambda job_id: f"queued for attempt {server.retry(job_id)['attempt'] + 1}")


def _chosen(job_ids: list[int] | None, state: str | None, filters: Filters) -> JobFilter | None:
    is_filter = state is not None or filters != Filters()
    if bool(job_ids) == is_filter:
        options = "--state, --kind, --label, --sweep, --submitted-by and --mine"
        raise typer.BadParameter(f"give ids, or at least one of {options}, and not both")
    return filters.given(state) if is_filter else None


def _each(job_ids: list[int], act: Callable[[int], str]) -> None:
    """Call `act` for every job and print its result; exits with 1 at the end if the server refused one."""
    from flopwatch import ClientError

    refused = 0
    for job_id in job_ids:
        try:
            echo(f"job {job_id} {act(job_id)}")
        except ClientError as error:
            refused += 1
            echo(f"error: job {job_id}: {error}", err=True)
    if refused:
        raise typer.Exit(1)


def _tell_without_effect(idle: Sequence[str] | None, spec: Mapping[str, Any]) -> None:
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        why = f"see `flopwatch specs {spec['kind']}`"
        if spec.get("step_code"):
            why = "a step of your own takes arguments.NAME=VALUE"
        echo_line(f"note: {', '.join(idle)} {verb} no effect here ({why})", err=True)


def _how_it_goes_on(server: Flopwatch, job_id: int) -> str:
    """Return what becomes of a job that nobody waits for any more."""
    job = server.job(job_id)
    if job["state"] == "queued" and job["waiting"] is not None:
        return f"job {job_id} has not started: {job['waiting']}; `flopwatch cancel {job_id}` removes it from the queue"
    return f"job {job_id} is still running; stop it with `flopwatch cancel {job_id}`"


@contextlib.contextmanager
def _going_on_when_interrupted(message: Callable[[], str]) -> Iterator[None]:
    from flopwatch import WaitTimeout

    try:
        yield
    except KeyboardInterrupt:
        echo(message(), err=True)
        raise typer.Exit(130) from None
    except WaitTimeout:
        echo(f"not done in time: {message()}", err=True)
        raise typer.Exit(GOES_ON) from None
