"""The short document of `--format brief`, which programs read, such as coding agents.

It has at most MOST_LINES lines, the same keys for all commands, no colours and no progress. Errors have it, too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from app.cli.terminal import cell, echo, echo_json
from flopwatch.text.cases import case_text
from flopwatch.text.times import ran
from flopwatch.text.validity import doubts, verdict

if TYPE_CHECKING:
    from flopwatch import Flopwatch

MOST_LINES = 60
DIGITS = 5
"""Significant digits of numbers."""
HEADLINE = ("metric", "unit", "baseline", "candidate", "ratio", "ratio_low", "ratio_high", "finding")
IN_SENTENCES: Mapping[str, Sequence[str]] = {"diagnosis": ("causes", "changes")}
"""Tables that have in numbers what the answer of a kind says in sentences; the first sentence stays one."""
MOST_ROWS = 20
"""Of each of these tables."""
DIFFERENT = ("better", "worse", "changed", "differs")
"""Findings of rows that matter."""


@dataclass(frozen=True)
class Brief:
    """What a command answers. Lists are cut so that the document keeps to MOST_LINES."""

    outcome: str
    """One word: the state of a job, the answer of a gate or a comparison, `ok` of a table, `error`."""
    sentence: str | None = None
    exit_code: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further keys; those without a value are left out of a text, and null in JSON."""
    row: Sequence[Mapping[str, Any]] = ()
    note: Sequence[str] = ()
    more: Sequence[str] = ()
    """Commands that tell more."""

    def as_json(self) -> dict[str, Any]:
        """Return the document; `left_out` counts the entries of lists that are not in it."""
        lists: dict[str, list[Any]] = {
            "row": [{name: _short(value) for name, value in row.items() if value is not None} for row in self.row],
            "note": list(self.note),
            "more": list(self.more),
        }
        head = {"outcome": self.outcome, "exit_code": self.exit_code, "sentence": self.sentence, **self.facts}
        room, all_of_them = MOST_LINES - len(head) - 1, sum(map(len, lists.values()))
        while (left := sum(map(len, lists.values()))) > room:
            max(lists.values(), key=len).pop()
        values = {name: _short(value) for name, value in head.items()}
        return {**values, **lists, "left_out": all_of_them - left}

    def lines(self) -> list[str]:
        """Return the document as text: `key: value`, a line for each entry of a list; objects are JSON."""
        document = self.as_json()
        lists = {"row", "note", "more"}
        return [
            f"{name}: {cell(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}"
            for name, entry in document.items()
            for value in (entry if name in lists else [entry])
            if value is not None and (name, value) != ("left_out", 0)
        ]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)


def answer(brief: Brief, *, as_json: bool = False) -> NoReturn:
    """Print the document, and exit with its code."""
    if as_json:
        echo_json(json.dumps(brief.as_json(), indent=2, ensure_ascii=False))
    else:
        echo("\n".join(brief.lines()))
    raise typer.Exit(brief.exit_code)


def of_error(message: str, exit_code: int = 1, outcome: str = "error") -> Brief:
    """Return the document of an error; the first line of a message is its sentence."""
    sentence, others = _headed(message)
    return Brief(outcome, sentence, exit_code, note=others)


def _headed(message: str) -> tuple[str | None, list[str]]:
    """Part a message into its first line, with the second if there are only two, and the other lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (": ".join(lines), []) if len(lines) == 2 else (next(iter(lines), None), lines[1:])


def of_job(server: Flopwatch, job: Mapping[str, Any], exit_code: int) -> Brief:
    """Return the document of a job: its state, verdict, the rows that it answers with, and its tables."""
    from flopwatch.connection import problem_text  # imports httpx, which the help needs not

    job_id, state, progress = job["id"], job["state"], job["progress"]
    validity = job["validity"] or {}
    sentence, others = _headed(problem_text(job["error"]) if job["error"] is not None else "")
    if state == "queued":
        sentence = job["waiting"]
    if sentence is None and state == "running" and progress["total"]:
        sentence = f"{progress['done']} of {progress['total']} done: {progress['message']}"
    rows: list[Mapping[str, Any]] = []
    tables = server.list_tables(job_id) if job["finished_at"] else []
    said = IN_SENTENCES.get(job["kind"], ())
    for table in tables:
        if table["name"] in said:
            rows += _in_use(server.job_table_rows(job_id, table["name"]))
        elif said and table.get("answers"):
            first, *lines = [row[table["name"]] for row in server.job_table_rows(job_id, table["name"])]
            wrapped = itertools.takewhile(lambda line: line[:1] == " ", lines)
            sentence = sentence or " ".join([first, *map(str.strip, wrapped)])
        elif table.get("answers"):
            rows += server.job_table_rows(job_id, table["name"])
    missing: list[str] = []
    if job["finished_at"] and server.has_measurements(job_id):
        table = server.get("/tables", job=job_id, format="json")
        rows += [] if said and rows else list(map(_of_row, table["rows"]))
        missing = table["missing"]
    shown = "--format brief"
    more = [] if state != "failed" else [f"flopwatch logs {job_id}"]
    more += [] if job["finished_at"] else [f"flopwatch show {job_id} {shown}", f"flopwatch cancel {job_id}"]
    more += [f"flopwatch compare {job_id} {shown}"] if job["kind"] == "compare" and state == "succeeded" else []
    whole = next((table["name"] for table in tables if not (said and table.get("answers"))), None)
    more += [f"flopwatch table --job {job_id} --name {whole} --limit 20 {shown}"] if whole else []
    facts = {
        "job": job_id,
        "kind": job["kind"],
        "case": case_text(job["summary"]) or None,
        "unused": list(job.get("without_effect") or ()) or None,
        "verdict": verdict(validity) if validity else None,
        "ran": ran(job),
        "tables": [table["name"] for table in tables] or None,
    }
    outcome = "wrong" if validity.get("verdict") == "wrong" and state == "succeeded" else job.get("outcome") or state
    return Brief(outcome, sentence, exit_code, facts, rows, [*others, *doubts(validity), *missing], more)


def _in_use(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first rows without the number of their unit; those of changes that were not measured come last."""
    measured_first = sorted(rows, key=lambda row: row.get("verdict") in ("refused", "not_tried"))
    return [{name: value for name, value in row.items() if name != "unit_index"} for row in measured_first[:MOST_ROWS]]


def of_table(table: Mapping[str, Any]) -> Brief:
    """Return the document of a table as the server writes it in JSON."""
    more = [*(table.get("missing") or ()), *(["further rows: --limit"] if table.get("next") else [])]
    return Brief("ok", None, 0, {"rows": len(table["rows"])}, list(map(_of_row, table["rows"])), more)


def _of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without what `show` tells; in place of a number that there is not is its outcome."""
    kept = {}
    for name, value in row.items():
        metric, comma, place = name.partition(", ")  # of a pivot
        about = (metric.removesuffix(end) for end in ("_n", "_outcome") if metric.endswith(end))
        if any(f"{of}{comma}{place}" in row for of in about):
            continue
        if name == "validity_reason" or (name == "partial" and not value):
            continue
        outcome = row.get(f"{metric}_outcome{comma}{place}")
        kept[name] = value if value is not None or outcome == "ok" else outcome
    return kept


def of_comparison(compared: Mapping[str, Any], outcome: str | None, sentence: str, exit_code: int) -> Brief:
    """Return the document of a comparison as `GET /compare` answers it: the ratio of what was tested with its interval,
    if that is one row, and the rows of the headline and of what else was tested, then of those that differ. `outcome`:
    that of the gate; None without one: the conclusion."""
    names = [column["name"] for column in compared["columns"]]
    of_metrics = "metric" in names
    every, headline = compared["rows"], compared["headline"]
    tested = [not of_metrics or row["metric"] == headline or row["p_adjusted"] is not None for row in every]
    rows = [row for row, is_tested in zip(every, tested, strict=True) if is_tested]
    coordinates = names[: names.index("metric")] if of_metrics else []
    kept = [*coordinates, *HEADLINE] if of_metrics else names
    others = (row for row, is_tested in zip(every, tested, strict=True) if not is_tested)
    differing = [row for row in others if row["finding"] in DIFFERENT]
    cases = {tuple(row[name] for name in coordinates) for row in every}
    only = rows[0] if of_metrics and len(rows) == len(cases) == 1 else {}
    jobs = {side: compared[side]["jobs"] for side in ("baseline", "candidate")}
    is_one = compared["baseline"]["kind"] == "compare" and jobs["baseline"] == jobs["candidate"]
    job = jobs["baseline"][0] if is_one else None
    facts = {
        "conclusion": compared["conclusion"],
        "metric": headline,
        "ratio": only.get("ratio"),
        "ratio_low": only.get("ratio_low"),
        "ratio_high": only.get("ratio_high"),
        "better": only.get("better"),
        "in_turns": compared["alternated"],
        "returned": (compared["agreement"] or {}).get("sentence"),
        "job": job,
        **({} if is_one else jobs),
    }
    shown = [{name: row[name] for name in kept} for row in (*rows, *differing)]
    notes = [note for note in compared["notes"] if "Hodges" not in note]  # how values are estimated: the docs tell
    more = [] if job is None else [f"flopwatch compare {job}", f"flopwatch show {job} --format brief"]
    return Brief(outcome or compared["conclusion"], sentence, exit_code, facts, shown, notes, more)


def of_check(checked: Mapping[str, Any], exit_code: int) -> Brief:
    """Return the document of a check: a row for each kind of job."""
    rows = [
        {
            "kind": comparison["candidate"]["kind"],
            "jobs": comparison["candidate"]["jobs"],
            "baseline_jobs": comparison["baseline"]["jobs"],
            "in_turns": comparison["alternated"],
            "outcome": comparison["gate"]["outcome"],
            "sentence": comparison["gate"]["sentence"],
        }
        for comparison in checked["comparisons"]
    ]
    more = [f"flopwatch show {job} --format brief" for job in checked["jobs"]]
    return Brief(checked["outcome"], checked["sentence"], exit_code, {"jobs": checked["jobs"]}, rows, more=more)
