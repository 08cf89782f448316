"""Commands that compare results, and keep baselines: compare, check, baseline."""

from __future__ import annotations

import contextlib
import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import arguments, completing
from app.cli.brief import Brief, answer, of_check, of_comparison
from app.cli.commands.results import BRIEF, MARKDOWN, TableFormat, format_of, print_table
from app.cli.common import (
    TEXT,
    WRONG,
    AsJson,
    AsText,
    BriefJson,
    ExpectEqual,
    Label,
    MetricOption,
    cli,
    command,
    of_jobs,
    of_sweep,
    with_server,
)
from app.cli.terminal import echo, echo_line, first_of
from flopwatch.alternating import FEWEST, MOST
from flopwatch.text.numbers import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flopwatch import Flopwatch
    from flopwatch.client import ComparisonText
    from flopwatch.progress import Show
    from flopwatch.queries import Question

EXIT_CODES = {
    "passed": 0,
    "slower": 3,
    "inconclusive": 4,
    "invalid": 5,
    "missing": 6,
    "not_comparable": 7,
    "wrong": WRONG,
    "not_confirmed": 9,
    "not_better": 10,
    "better": 0,
}
"""Exit codes of `compare`, `versus` and `check`, by the gate's outcome, or the answer to `--keep-if better`. 1 is any
error, 2 a wrong command line."""
DEFAULT_LIMIT_PERCENT = 5.0
EQUAL = 1e-4
"""With `--keep-if better`, the relative difference by which the numbers that steps return may differ, by default."""
ALTERNATE = "--alternate measures both versions of your code in alternation, which detects smaller differences"
SIDES = ("baseline", "candidate")
WITH_REFERENCE = ("attention", "kernel")
"""Kinds whose results are compared with a reference by the job itself; their steps return no numbers."""

Alternate = Annotated[
    bool,
    typer.Option(
        "--alternate",
        help="If it is inconclusive or slower: measure both versions of your own code again, in alternation, by "
        f"{FEWEST} to {MOST} processes of each, as the noise needs.",
    ),
]
ComparedWith = Annotated[
    str | None,
    of_jobs("[BASELINE]", "What to compare with: a job's id, several with commas between them, or a baseline's name."),
]
Compared = Annotated[
    str | None,
    of_jobs("[CANDIDATE]", "The job that is compared, or several; none: the first is a job of kind compare."),
]
ComparedSweeps = Annotated[
    list[int] | None,
    typer.Option(
        "--sweep",
        metavar="ID",
        help="Instead of CANDIDATE: the jobs of this sweep; twice: of the first sweep, then of the second.",
        autocompletion=completing.sweep_ids,
    ),
]
Better = enum.StrEnum("Better", {"better": "better"})
Name = Annotated[str, typer.Argument(metavar="NAME", help="The baseline's name.")]


@dataclass(frozen=True)
class Judging:
    """Options that ask whether a comparison is good enough."""

    metric: MetricOption = None
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Exit with 3 if the candidate is worse by more than this, such as 5%; see the docs."
        ),
    ] = None
    expect_equal: ExpectEqual = None
    keep_if: Annotated[
        Better | None,
        typer.Option(
            help="Exit with 0 only if the candidate is better, in alternation, worse in no case, and returns the same "
            "numbers; with 10 if it is not better."
        ),
    ] = None

    def question(self) -> Question:
        """Return what the server is asked."""
        limit = _percent(self.fail_above)
        return {"metrics": self.metric, "fail_above_percent": limit, "expect_equal": self.expect_equal}


@command
def compare(
    server: Flopwatch,
    baseline: ComparedWith = None,
    candidate: Compared = None,
    *,
    sweep_id: ComparedSweeps = None,
    judging: Judging,
    alternate: Annotated[
        bool,
        typer.Option("--alternate", help="Measure the specs of both jobs again, in alternation, and compare that."),
    ] = False,
    replicates: Annotated[
        int, typer.Option(min=1, max=100, help="With --alternate: fresh processes of each job's spec.")
    ] = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Profiles only: rows per table and phase, largest changes first.")
    ] = None,
    output_format: Annotated[TableFormat, typer.Option("--format", help="How to write it.")] = MARKDOWN,
    as_json: BriefJson = False,
) -> None:
    """Compare finished jobs, or the sides of a job of kind `compare`: what the candidate gained or lost, and whether
    that is more than chance."""
    compared = _sides(server, baseline, candidate, sweep_id or [])
    if alternate:
        quiet = as_json or output_format == BRIEF
        compared = _again_in_turns(server, *compared, replicates, show=(lambda *_: None) if quiet else None), None
    if as_json or output_format == BRIEF or judging.keep_if is not None:
        judged = judge(server, *compared, judging)
        if as_json or output_format == BRIEF:
            answer(judged, as_json=as_json)
        print_table(
            server.compare_text(*compared, format=format_of(output_format), metrics=judging.metric).text, output_format
        )
        echo_line(judged.sentence or "", err=output_format != MARKDOWN)  # other formats are for programs
        raise typer.Exit(judged.exit_code)
    comparison = server.compare_text(
        *compared,
        format=format_of(output_format),
        limit=limit,
        **judging.question(),
    )
    print_table(comparison.text, output_format)
    is_judged = judging.fail_above is not None or judging.expect_equal is not None
    _exit(comparison, output_format, is_judged=is_judged)


def judge(server: Flopwatch, baseline: str | list[int], candidate: list[int] | None, judging: Judging) -> Brief:
    """Return the document of a comparison, with the answer of the gate or to `--keep-if`, if one is asked for, or a
    wrong result as its outcome."""
    from flopwatch.queries import comparison_query

    limit, expect_equal = _percent(judging.fail_above), judging.expect_equal
    if judging.keep_if is not None:
        limit = DEFAULT_LIMIT_PERCENT if limit is None else limit
        if expect_equal is None and not _has_reference(server, baseline, candidate):
            expect_equal = EQUAL
    question: Question = {"metrics": judging.metric, "fail_above_percent": limit, "expect_equal": expect_equal}
    compared = server.get("/compare", **comparison_query(baseline, candidate, question))
    if judging.keep_if is not None:
        outcome, sentence = _keep(compared)
    elif compared["gate"] is not None:
        outcome, sentence = compared["gate"]["outcome"], compared["gate"]["sentence"]
    else:
        wrong = any("wrong" in (row.get(f"{side}_validity") for side in SIDES) for row in compared["rows"])
        return of_comparison(compared, "wrong" if wrong else None, compared["sentence"], WRONG if wrong else 0)
    return of_comparison(compared, outcome, sentence, EXIT_CODES[outcome])


def _has_reference(server: Flopwatch, baseline: str | list[int], candidate: list[int] | None) -> bool:
    jobs = candidate or baseline
    spec = server.job(int(jobs[0]))["spec"]
    return spec.get("candidate", spec).get("kind") in WITH_REFERENCE


def _keep(compared: Mapping[str, Any]) -> tuple[str, str]:
    """Answer `--keep-if better`: the outcome, and why. It is "better" only if the headline metric is, measured in
    turns, no case is worse by more than the limit, missing, invalid or wrong, and the steps return the same and do
    equal work."""
    gate, sentence = compared["gate"], compared["sentence"]
    if gate["outcome"] != "passed":
        return gate["outcome"], gate["sentence"]
    if work := (compared["agreement"] or {}).get("work_differs"):
        return "invalid", f"invalid: the work of a step is not the same: {', '.join(work)}"
    if compared["conclusion"] == "inconclusive":
        return "inconclusive", sentence
    if compared["conclusion"] != "better":
        return "not_better", f"not better: {sentence}"
    if not compared["alternated"]:
        return "not_confirmed", f"not confirmed: {sentence}; compare --alternate measures both in turns"
    return "better", sentence


def _exit(comparison: ComparisonText, output_format: TableFormat, *, is_judged: bool) -> None:
    """Exit with the code of the gate's answer or, without a gate, of a wrong result."""
    if is_judged:
        if output_format.value != "markdown":  # the text of other formats does not have it
            echo_line(comparison.gate_sentence, err=True)
        raise typer.Exit(EXIT_CODES[comparison.gate])
    if comparison.wrong_sides:
        sides = comparison.wrong_sides.replace(",", " and the")
        echo(f"wrong: a result of the {sides} differs from the reference", err=True)
        raise typer.Exit(WRONG)


def _again_in_turns(
    server: Flopwatch, baseline: str | list[int], candidate: list[int] | None, replicates: int, *, show: Show | None
) -> list[int]:
    if isinstance(baseline, str) or candidate is None or len(baseline) != 1 or len(candidate) != 1:
        raise typer.BadParameter("needs one job as BASELINE and one as CANDIDATE", param_hint="--alternate")
    job = server.measure_in_turns(baseline[0], candidate[0], replicates=replicates, show=show)
    return [job["id"]]


def _sides(
    server: Flopwatch, baseline: str | None, candidate: str | None, sweeps: Sequence[int]
) -> tuple[str | list[int], list[int] | None]:
    """Return the two sides: the ids of jobs, or a baseline's name; and for one job of kind compare no candidate."""
    named = [side for side in (baseline, candidate) if side is not None]
    if not (named or sweeps) or (sweeps and len(named) + len(sweeps) != 2):
        raise typer.BadParameter("give BASELINE and CANDIDATE, BASELINE and --sweep, or --sweep twice")
    if sweeps:
        of_sweeps = [_jobs_of(server, sweep) for sweep in sweeps]
        return of_sweeps[0] if baseline is None else _ids(baseline) or baseline, of_sweeps[-1]
    assert baseline is not None
    ids = _ids(baseline)
    if candidate is None:
        if ids is None or len(ids) != 1:
            raise typer.BadParameter(
                "give a CANDIDATE, too; or the id of one job of kind compare", param_hint="BASELINE"
            )
        return ids, None
    candidates = _ids(candidate)
    if candidates is None:
        raise typer.BadParameter("give a job's id, or several with commas between them", param_hint="CANDIDATE")
    return baseline if ids is None else ids, candidates


def _jobs_of(server: Flopwatch, sweep_id: int) -> list[int]:
    return sorted(job["id"] for job in server.jobs_of_sweep(sweep_id))


def _ids(text: str) -> list[int] | None:
    """Return the ids of jobs: "17" or "17,18"; None if the text is something else."""
    return [int(part) for part in text.split(",")] if re.fullmatch(r"\d{1,18}(,\d{1,18})*", text, re.ASCII) else None


def _percent(text: str | None) -> float | None:
    """Read "5%", "5 %" or "5" as percent."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4}(\.\d{1,6})?)\s*%?", text.strip(), re.ASCII)
    if match is None or not 0 < float(match[1]) <= 1000:
        raise typer.BadParameter(f"{text!r} is no percentage above 0, such as 5%", param_hint="--fail-above")
    return float(match[1])


@command
def check(
    server: Flopwatch,
    job_ids: Annotated[
        list[int] | None, of_jobs("[JOB…]", "The finished jobs to check; none: run the baseline's specs again.")
    ] = None,
    *,
    baseline: Annotated[str, typer.Option(metavar="NAME", help="The baseline's name.")],
    sweep_id: Annotated[int | None, of_sweep("Instead of JOB: the jobs of this sweep.")] = None,
    metric: MetricOption = None,
    fail_above: Annotated[
        str, typer.Option(metavar="PERCENT", help="Exit with 3 if a case is worse by more than this.")
    ] = f"{DEFAULT_LIMIT_PERCENT:g}%",
    expect_equal: ExpectEqual = None,
    timeout_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Wait no longer than this for the jobs.")
    ] = None,
    label: Label = None,
    alternate: Alternate = False,
    as_json: AsJson = False,
    output_format: AsText = TEXT,
) -> None:
    """Check jobs against a baseline. Without jobs, run the baseline's specs again and wait for them.

    Exit codes: 0 passed, 3 slower, 4 inconclusive (also on another device or environment), 5 invalid, 6 missing,
    8 wrong, 9 slower but not confirmed, because both were not measured in alternation.
    """
    from app.cli.output import print_json, progress_display

    brief = output_format == BRIEF
    if job_ids and sweep_id is not None:
        raise typer.BadParameter("give JOB, or --sweep, and not both")
    if sweep_id is not None:
        job_ids = _jobs_of(server, sweep_id)
    if job_ids and label:
        raise typer.BadParameter("labels are for the jobs that run again: leave JOB and --sweep, or --label, out")
    limit, labels = _percent(fail_above), arguments.parse_pairs(label or [])
    assert limit is not None
    with contextlib.nullcontext(lambda *_: None) if brief else progress_display() as show:
        checked = server.check(
            baseline,
            job_ids or None,
            metrics=metric,
            fail_above_percent=limit,
            expect_equal=expect_equal,
            labels=labels,
            timeout_s=timeout_s,
            alternate=alternate,
            show=show,
        )
    if brief:
        answer(of_check(checked, EXIT_CODES[checked["outcome"]]), as_json=as_json)
    if as_json:
        print_json(checked)
    else:
        _print_checked(checked, baseline)
        if not alternate and server.can_alternate(checked):
            echo_line(ALTERNATE, err=True)
    raise typer.Exit(EXIT_CODES[checked["outcome"]])


def _print_checked(checked: Mapping[str, Any], baseline: str) -> None:
    for comparison in checked["comparisons"]:
        how = ", in turns" if comparison["alternated"] else ""
        echo_line(f"{_jobs(comparison['candidate']['jobs'])} against {baseline}{how}: {comparison['gate']['sentence']}")


baseline = typer.Typer(no_args_is_help=True, help="Keep named results that later ones are checked against.")
cli.add_typer(baseline, name="baseline")


@baseline.command("set")
@with_server
def set_(
    server: Flopwatch,
    name: Name,
    job_id: Annotated[int | None, of_jobs("[JOB]", "A job that succeeded.")] = None,
    *,
    sweep_id: Annotated[int | None, of_sweep("Instead of a job: a finished sweep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put a job's results, or a sweep's, into a baseline, in place of those of the same cases."""
    from app.cli.output import print_json

    if (job_id is None) == (sweep_id is None):
        raise typer.BadParameter("give a JOB, or --sweep, and not both")
    kept = server.set_baseline(name, job=job_id, sweep=sweep_id)
    if as_json:
        print_json(kept)
        return
    number = kept["number_of_cases"]
    echo(f"baseline {name}: {number} case{'s' if number != 1 else ''} of {_jobs(kept['jobs'])}")
    for case in kept["left_out"]:
        echo(f"left out: job {case['job']}, {case['why']}", err=True)
    for case in kept["suspect"]:
        echo(f"note: includes job {case['job']}: {case['why']} (see `flopwatch show {case['job']}`)", err=True)


@baseline.command("list")
@with_server
def list_(
    server: Flopwatch, *, limit: Annotated[int, typer.Option(min=1, help="How many.")] = 50, as_json: AsJson = False
) -> None:
    """List baselines by name."""
    from app.cli.output import print_list
    from flopwatch.text.times import age

    told = {"jobs": lambda baseline: _jobs(baseline["jobs"]), "set": lambda baseline: age(baseline["updated_at"])}
    columns = {"name": "name", "cases": "number_of_cases", **told, "by": "set_by"}
    print_list(first_of(server.list_baselines(limit + 1), limit), columns, as_json=as_json)


@baseline.command("show")
@with_server
def show(server: Flopwatch, name: Name, *, as_json: AsJson = False) -> None:
    """Show the cases of a baseline, each with its device, its verdict and its jobs."""
    from app.cli.output import print_json, print_list

    baseline = server.baseline(name)
    if as_json:
        print_json(baseline)
        return
    told = {
        "verdict": lambda case: case["validity"] or NOTHING,
        "jobs": lambda case: ", ".join(map(str, case["jobs"])),
    }
    columns = {"kind": "kind", "case": "case", "device": "device_key", **told, "case key": "case_key"}
    print_list(baseline["cases"], columns)


@baseline.command("delete")
@with_server
def delete(server: Flopwatch, name: Name) -> None:
    """Delete a baseline; its jobs stay."""
    server.delete_baseline(name)
    echo(f"baseline {name} deleted")


MAX_LISTED_JOBS = 5


def _jobs(job_ids: Sequence[int]) -> str:
    """Write jobs in short: "job 17", "jobs 17, 18", "12 jobs"."""
    if len(job_ids) > MAX_LISTED_JOBS:
        return f"{len(job_ids)} jobs"
    return f"job{'s' if len(job_ids) != 1 else ''} {', '.join(map(str, job_ids)) or 'none'}"
