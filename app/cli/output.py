"""Prints aligned columns, progress, and jobs in words."""

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from app.cli.terminal import cell, echo, echo_columns, echo_json, echo_line, echo_table
from app.states import FIRST_IN_QUEUE
from flopwatch.client import Flopwatch
from flopwatch.connection import ClientError, problem_text
from flopwatch.progress import Show, progress_bar
from flopwatch.queries import Question
from flopwatch.text.cases import case_text
from flopwatch.text.markdown_tables import cut
from flopwatch.text.numbers import NOTHING, number
from flopwatch.text.times import age, duration, moment, ran
from flopwatch.text.validity import doubts, noisy_host, not_judged, notes, verdict

MAX_NAMED = 10
"""Largest number of job ids that are printed for one reason to wait, and of files."""
MOST_KERNELS = 10
"""Number of kernels that are printed when a profile has ended."""
GROWTH = "growth"
"""The check whose finding is an answer, also where it has passed: whether memory leaks."""
MOST_LINES = 15
"""Number of lines of the user's own code that are printed of a profile."""
LINE_COLUMNS = (
    *("file", "line", "function", "self_ms", "self_percent", "self_margin_percent", "total_ms", "python_ms"),
    *("device_self_ms", "device_total_ms", "calls", "code"),
)
"""Columns of these lines, as far as they have values."""
MOST_ALLOCATIONS = 3
"""Number of allocations that are printed of a memory's peak."""
MOST_COMPARED = 5
"""Number of rows of each table and phase that are printed when a comparison of profiles has ended."""


def print_json(value: Any) -> None:
    echo_json(json.dumps(value, indent=2, ensure_ascii=False))


def print_columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    echo_columns(head, [[_text(value) for value in row] for row in rows])


def print_list(listed: Sequence[Any], columns: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print what a list has as a table, or as JSON. `columns` have by head the member's name, or what tells the cell
    of an entry."""
    if as_json:
        print_json(listed)
        return
    rows = [[entry[of] if isinstance(of, str) else of(entry) for of in columns.values()] for entry in listed]
    print_columns(list(columns), rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or NOTHING
    return number(value)


def print_job(job: dict[str, Any], place: int | None = None) -> None:
    """Print a job's main facts, one per line. `place` is its place in the queue."""
    how = f" with outcome {job['outcome']}" if job.get("outcome") else ""
    name = f" ({cell(job['name'])})" if job["name"] else ""
    echo_line(f"job {job['id']}: {job['kind']}, {job['state']}{how}{name}")
    progress = job["progress"]
    facts = {
        "case": case_text(job["summary"]) or None,
        "labels": _text(job["labels"]) if job["labels"] else None,
        "note": job["note"],
        "user": job["submitted_by"],
        "sweep": job["sweep_id"],
        "priority": job["priority"],
        "place": f"{place} in the queue" if place is not None else None,
        "unused": ", ".join(job.get("without_effect") or ()) or None,
        "waiting": job.get("waiting") or (FIRST_IN_QUEUE if place == 1 else None),
        "created": ", ".join(filter(None, (moment(job["created_at"]), age(job["created_at"])))) or None,
        "started": moment(job["started_at"]),
        "finished": moment(job["finished_at"]),
        "duration": ran(job),
        "progress": f"{progress['done']}/{progress['total']} {progress['message']}" if progress["total"] else None,
        "attempt": f"{job['attempt']} of {job['max_attempts']}",
        "worker": job["worker_id"],
        "key": job["unique_key"],
        "timeout": "none" if job["timeout_s"] is None else duration(job["timeout_s"]),
        "broken": (job.get("broken") or {}).get("detail"),
        "validity": verdict(job["validity"]) if job["validity"] is not None else None,
    }
    _print_facts(facts)
    validity = job["validity"] or {}
    unjudged = not_judged(validity)
    checks = [check for check in validity.get("checks") or () if check.get("name") == GROWTH and check.get("ok")]
    passed = dict.fromkeys(f"passed: {GROWTH}: {check['detail']}" for check in checks)
    for line in [*doubts(validity), *([f"not judged: {unjudged}"] if unjudged else []), *notes(validity), *passed]:
        echo_line(f"    {line}")
    if job["error"] is not None:
        echo_line(problem_text(job["error"]))


def _print_facts(facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if value is not None:
            echo_line(f"  {name + ':':10}{cell(str(value))}")


def print_job_list(jobs: Sequence[dict[str, Any]], places: Mapping[int, int]) -> None:
    """Print jobs, one per line, and below them why some of them have to wait. `places` in the queue are by job."""
    if noise := noisy_host(job["validity"] for job in jobs):
        echo_line(noise)
    columns = {
        "id": "id",
        "kind": "kind",
        "state": lambda job: job["outcome"] or job["state"],
        "case": lambda job: case_text(job["summary"]),
        "verdict": lambda job: (job["validity"] or {}).get("verdict"),
        "age": lambda job: age(job["created_at"]),
        "duration": ran,
        "place": lambda job: places.get(job["id"]),
        "priority": "priority",
        "user": "submitted_by",
        "name": "name",
        "labels": "labels",
    }
    print_list(jobs, columns)
    waiting: dict[str, list[str]] = {}
    for job in jobs:
        if job["waiting"] is not None:
            waiting.setdefault(job["waiting"], []).append(str(job["id"]))
    for reason, ids in waiting.items():
        echo_line(f"{_jobs_wait(ids)}: {cell(reason)}")


def _jobs_wait(ids: Sequence[str]) -> str:
    if len(ids) == 1:
        return f"job {ids[0]} waits"
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f"jobs {', '.join(ids[:MAX_NAMED])}{more} wait"


def print_results(server: Flopwatch, job: dict[str, Any], statistic: str | None = None) -> None:
    """Print a job's table as `flopwatch table` does, the reasons why cells have no numbers, its units and their tables.

    For a job that did not succeed, the table has its earlier measurements, marked, and why the other cells are empty.
    """
    _print_lines(server, job)
    _print_peak(server, job)
    if job["kind"] == "compare" and job["state"] == "succeeded":
        try:
            _print_sentence(server.get("/compare", job=job["id"]))
        except ClientError as error:  # such as results of an earlier release
            echo_line(str(error))
    tables = server.list_tables(job)
    if server.has_measurements(job):
        echo()
        echo_table(server.table_text(job=job, statistic=statistic))  # type: ignore[arg-type]  # the option's choices
        print_missing(server.missing(job))
    _print_units(server.units(job))
    _print_tables(job["id"], tables)
    _print_files(server, job)


def print_answers(server: Flopwatch, job: Mapping[str, Any]) -> None:
    """Print the tables that answer the kind's question; a table with one column is printed as sentences."""
    for table in server.list_tables(job):
        if table["answers"]:
            rows = server.job_table_rows(job["id"], table["name"])
            # Of one unit, its number says nothing.
            left_out = {"unit_index"} if len(table["units"]) == 1 else set()
            names = [column["name"] for column in table["columns"] if column["name"] not in left_out]
            if len(names) == 1:
                echo("\n".join(cell(row[names[0]]) for row in rows))  # laid out for 80 columns
            else:
                print_columns(names, [[row[name] for name in names] for row in rows])
            echo()


def _print_files(server: Flopwatch, job: Mapping[str, Any]) -> None:
    names = [cell(file["name"]) for file in server.list_files(job)]
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        echo_line(f"files: {', '.join(names[:MAX_NAMED])}{more}; `flopwatch download {job['id']}` fetches them")


def print_answer(
    server: Flopwatch, job: dict[str, Any], question: Question | None = None, statistic: str | None = None
) -> None:
    """Print what a job has just answered. Of profiles and comparisons that succeeded, print the rows that matter and
    the command for the rest; of other jobs, and where a statistic is asked for, all results. `question`: of a
    comparison."""
    of_comparison = functools.partial(_print_comparison, question=question or {})
    answers: dict[str, Callable[..., bool]] = {"profile": _print_kernels, "compare": of_comparison}
    answer = answers.get(job["kind"])
    if statistic is not None or answer is None or job["state"] != "succeeded" or not answer(server, job):
        print_results(server, job, statistic)
    if job["state"] == "failed":
        echo_line(f"`flopwatch logs {job['id']}` prints its output")


def _print_lines(server: Flopwatch, job: Mapping[str, Any]) -> None:
    """Print the lines of the user's own code that take the most time of a step, if a profile has found them."""
    job_id = job["id"]
    if job["kind"] != "profile" or "lines" not in {table["name"] for table in server.list_tables(job_id)}:
        return
    rows = server.job_table_rows(job_id, "lines")[:MOST_LINES]
    if not rows:
        return
    echo()
    echo_line("lines of your code by their own time in an unprofiled step:")
    shown = [name for name in LINE_COLUMNS if any(row.get(name) is not None for row in rows)]
    cells = [[row.get(name) for name in shown] for row in rows]
    print_columns(shown, [[cut(value) if isinstance(value, str) else value for value in row] for row in cells])
    echo_line(f"{_table_command(job_id, 'lines')} prints all")


def _print_peak(server: Flopwatch, job: Mapping[str, Any]) -> None:
    """Print of kind `memory` the phase with the highest peak, and the largest allocations there with their lines."""
    job_id = job["id"]
    if job["kind"] != "memory" or "allocations" not in {table["name"] for table in server.list_tables(job_id)}:
        return
    rows = server.job_table_rows(job_id, "allocations")
    if not rows:
        return
    phase = rows[0]["at_peak_of"]
    at_peak = sorted((row for row in rows if row["at_peak_of"] == phase), key=lambda row: -row["total_mib"])
    where = "when memory ran out" if phase == "oom" else f"at the peak of memory, in phase {phase}"
    checks = {check["name"]: check["ok"] for check in (job["validity"] or {}).get("checks", ())}
    if phase != "oom" and not checks.get("history", True):
        where += " (the history is cut: the step's peak may be another)"
    echo()
    echo_line(f"largest allocations {where}; equal ones together:")
    columns = {"MiB": "total_mib", "count": "count", "category": "category", "name": "name"}
    print_list(at_peak[:MOST_ALLOCATIONS], {**columns, "made in": "made_in", "line": "site"})
    echo_line(f"{_table_command(job_id, 'allocations')} prints more")


def _print_kernels(server: Flopwatch, job: Mapping[str, Any]) -> bool:
    """Print the lines of the user's own code, and the kernels, on a CPU the operators, that take the most time of the
    whole step, or of the phases that the job profiled; False if there are no kernels."""
    job_id, phases = job["id"], job["spec"].get("phases")
    names = [table["name"] for table in server.list_tables(job_id) if table["name"].startswith("kernels-")]
    names = [name for name in names if name != "kernels-step"] or names  # it has the kernels of the others
    rows = [row for name in names for row in server.job_table_rows(job_id, name)]
    if not any(row.get("total_ms") for row in rows):
        return False
    kernels: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        sums = kernels.setdefault((row["name"], row["class"]), [0.0, 0.0])
        sums[0] += row["total_ms"] or 0.0
        sums[1] += row["calls"] or 0.0
    _print_lines(server, job)
    whole_ms = sum(total_ms for total_ms, _ in kernels.values())
    slowest = sorted(kernels.items(), key=lambda kernel: -kernel[1][0])[:MOST_KERNELS]
    echo()
    where = f"phase {', '.join(phases)}" if phases else "the whole step"
    echo_line(f"{len(slowest)} of {len(kernels)} kernels, by their time in {where} (a CPU's kernels are operators):")
    print_columns(
        ("kernel", "class", "ms per step", "share", "calls"),
        [
            (cut(name), class_name, total_ms, f"{100 * total_ms / whole_ms:.1f} %", calls)
            for (name, class_name), (total_ms, calls) in slowest
        ],
    )
    command = _table_command(job_id, names[0])
    echo_line(f"{command} prints all of one phase; `flopwatch show {job_id}` names the other tables")
    _print_files(server, job)
    return True


def _print_comparison(server: Flopwatch, job: Mapping[str, Any], question: Question) -> bool:
    """Print a comparison as `flopwatch compare` does."""
    echo()
    echo_table(server.compare_text([job["id"]], limit=MOST_COMPARED, **question).text)
    print_missing(server.missing(job))
    return True


def _print_sentence(compared: Mapping[str, Any]) -> None:
    labels = next((its for its in compared["spec_differences"] if its["name"].endswith("revision.label")), None)
    sides = f"{labels['candidate']} against {labels['baseline']}: " if labels else ""
    echo()
    echo_line(f"{sides}{compared['sentence']}.")


def grid_text(sweep: Mapping[str, Any]) -> str:
    """Write a sweep's grid in short: "2 model.size × 3 context_length", "largest context_length up to 4096"."""
    paths = [f"{len(values)} {path}" for path, values in sweep["grid"].items()]
    fit = sweep["fit"]
    return " × ".join([*paths, *([] if fit is None else [f"largest {fit['axis']} up to {fit['upto']}"])])


def counts_text(counts: Mapping[str, int]) -> str:
    """Write the numbers of jobs by state: "3 succeeded, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def print_sweep(sweep: Mapping[str, Any]) -> None:
    """Print a sweep's main facts, one per line, and what its searches have found."""
    echo_line(
        f"sweep {sweep['id']}: {sweep['base'].get('kind')}" + (f" ({cell(sweep['name'])})" if sweep["name"] else "")
    )
    facts = {
        "grid": grid_text(sweep),
        "labels": _text(sweep["labels"]) if sweep["labels"] else None,
        "jobs": counts_text(sweep["counts"]),
        "created": ", ".join(filter(None, (moment(sweep["created_at"]), age(sweep["created_at"])))) or None,
        "broken": (sweep["broken"] or {}).get("detail"),
    }
    _print_facts(facts)
    print_searches(sweep)
    echo_line(
        f"`flopwatch jobs --sweep {sweep['id']}` lists its jobs, `flopwatch table --sweep {sweep['id']}` its results"
    )


def print_searches(sweep: Mapping[str, Any]) -> None:
    """Print what each search of a sweep has found: the largest value that fits, and the first that does not."""
    for search in sweep["searches"] or ():
        point = ", ".join(f"{path}={value}" for path, value in search["point"].items())
        result = "nothing fits yet" if search["state"] == "searching" else "nothing fits"
        if search["largest"] is not None:
            result = f"{search['axis']}={search['largest']} fits (job {search['largest_job']})"
        if search["too_large"] is not None:
            result += f", {search['too_large']} does not (job {search['too_large_job']})"
        state = "" if search["state"] == "done" else f" [{search['state']}]"
        reason = f". {search['reason']}" if search["reason"] else ""
        echo_line(cell(f"{f'{point}: ' if point else ''}{result}{state}{reason}"))


def print_dry_run(
    server: Flopwatch, specs: Sequence[Mapping[str, Any]], dry: Mapping[str, Any], *, searches: bool, as_json: bool
) -> None:
    """Print how many jobs a submission would be, how long earlier ones took, and whether no worker has the devices."""
    from app.cli.dry_run import took, unavailable

    jobs, most = dry["jobs"], dry["most_jobs"]
    earlier = took(server, str(specs[0].get("kind")), specs)
    lacking = unavailable(server, specs)
    if as_json:
        known = {"median_s": earlier.median_s, "rests_on": list(earlier.jobs), "unavailable": lacking}
        print_json({"jobs": jobs, "most_jobs": most, **known})
        return
    several = "" if jobs == 1 else "s"
    search = f"{jobs} search{'es' if several else ''}, one job at a time each, at most {most} jobs in all"
    echo(search if searches else f"{jobs} job{several}")
    echo_line(earlier.sentence())
    if lacking is not None:
        echo_line(lacking)
    echo("nothing was submitted (--dry-run)", err=True)


def print_missing(lines: Sequence[str]) -> None:
    """Print below a table why cells have no numbers."""
    if lines:
        echo_line("\n" + "\n".join(lines))


def _print_units(units: Sequence[dict[str, Any]]) -> None:
    if len(units) > 1:
        echo()
        told = {"validity": lambda unit: verdict(unit["validity"]) if unit["validity"] else None}
        print_list(units, {"unit": "unit_index", "title": "title", "outcome": "outcome", **told})


def _print_tables(job_id: int, tables: Sequence[dict[str, Any]]) -> None:
    if tables:
        echo()
        print_list(tables, {"table": "name", "rows": "rows"})
        echo_line(f"{_table_command(job_id, tables[0]['name'])} prints one")


def _table_command(job_id: int, name: str) -> str:
    return f"`{shlex.join(['flopwatch', 'table', '--job', str(job_id), '--name', name])}`"


@contextlib.contextmanager
def progress_display() -> Iterator[Show]:
    """Shows (done, total, message) as a bar on a terminal and as plain lines elsewhere, on stderr."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    with progress_bar() as show:
        yield show


class OutputDisplay:
    """Shows progress, and what the job waits for, as plain lines on stderr, and the job's output on stdout."""

    def __init__(self) -> None:
        self._show = _plain_progress()

    def __call__(self, done: int, total: int, message: str) -> None:
        self._show(done, total, message)

    def log(self, text: str) -> None:
        echo(text, nl=False)


def _plain_progress() -> Show:
    last = ""

    def show(done: int, total: int, message: str) -> None:
        nonlocal last
        line = cell(f"{done}/{total} {message}" if total else message)
        if line != last:
            echo(line, err=True)
        last = line

    return show
