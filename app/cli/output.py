"""Prints aligned columns, progress, and jobs in words."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from app.cli.terminal import cell, echo, echo_json
from app.client import Flopwatch, Show, problem_text, progress_bar
from app.layout import doubts, notes, number, varying_columns, verdict

SHOWN_MEASUREMENTS = 200
"""Rows shown of a job that did not succeed."""


def print_json(value: Any) -> None:
    echo_json(json.dumps(value, indent=2, ensure_ascii=False))


def print_columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a plain table, the same on a terminal and in a pipe."""
    cells = [list(head), *([cell(_text(value)) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "–"
    return number(value)


def print_job(job: dict[str, Any]) -> None:
    """Print a job's main facts, one per line."""
    echo(f"job {job['id']}: {job['kind']}, {job['state']}" + (f" ({cell(job['name'])})" if job["name"] else ""))
    progress = job["progress"]
    facts = {
        "labels": _text(job["labels"]) if job["labels"] else None,
        "attempt": f"{job['attempt']} of {job['max_attempts']}",
        "worker": job["worker_id"],
        "created": job["created_at"],
        "started": job["started_at"],
        "finished": job["finished_at"],
        "progress": f"{progress['done']}/{progress['total']} {progress['message']}" if progress["total"] else None,
        "waiting": job.get("waiting"),
        "key": job["unique_key"],
        "timeout": "none" if job["timeout_s"] is None else f"{number(job['timeout_s'])} s",
        "broken": (job.get("broken") or {}).get("detail"),
        "validity": verdict(job["validity"]) if job["validity"] is not None else None,
    }
    for name, value in facts.items():
        if value is not None:
            echo(f"  {name + ':':10}{cell(value)}")
    for line in (*doubts(job["validity"] or {}), *notes(job["validity"] or {})):
        echo(f"    {line}")
    if job["error"] is not None:
        echo(problem_text(job["error"]))


def print_results(server: Flopwatch, job: dict[str, Any]) -> None:
    """Print a job's table as `flopwatch table` does, why cells have no numbers, its units and their tables.

    A job that did not succeed has no table; the measurements that it made are listed instead.
    """
    measurements = server.get(f"/jobs/{job['id']}/measurements", limit=SHOWN_MEASUREMENTS)
    if measurements["rows"]:
        echo()
        if job["state"] == "succeeded":
            echo(server.text("/tables", job=job["id"], format="markdown"), nl=False)
        else:
            _print_partial(measurements)
        print_missing(server.get("/tables", job=job["id"])["missing"])
    _print_units(server.get(f"/jobs/{job['id']}/units")["data"])
    _print_tables(job["id"], server.get(f"/jobs/{job['id']}/tables")["data"])


def print_missing(lines: Sequence[str]) -> None:
    """Print below a table why cells have no numbers."""
    if lines:
        echo("\n" + "\n".join(lines))


def _print_partial(measurements: dict[str, Any]) -> None:
    echo("measured before it ended:")
    names = [*varying_columns(measurements), "phase", "metric", "unit", "n", "mean", "std", "median"]
    print_columns(names, [[row[name] for name in names] for row in measurements["rows"] if row["mean"] is not None])
    if measurements["next"] is not None:
        echo(f"and more: these are of its first {SHOWN_MEASUREMENTS} measurements")


def _print_units(units: Sequence[dict[str, Any]]) -> None:
    """Print the units of a job that has several."""
    if len(units) > 1:
        echo()
        rows = [
            [
                unit["unit_index"],
                unit["title"],
                unit["outcome"],
                verdict(unit["validity"]) if unit["validity"] else None,
            ]
            for unit in units
        ]
        print_columns(("unit", "title", "outcome", "validity"), rows)


def _print_tables(job_id: int, tables: Sequence[dict[str, Any]]) -> None:
    """Print the names of the tables that a job's units reported, with the command that prints the first."""
    if tables:
        echo()
        print_columns(("table", "rows"), [[table["name"], table["rows"]] for table in tables])
        echo(f"`{shlex.join(['flopwatch', 'table', '--job', str(job_id), '--name', tables[0]['name']])}` prints one")


@contextlib.contextmanager
def progress_display() -> Iterator[Show]:
    """Shows (done, total, message) as a bar on a terminal and as plain lines elsewhere, on stderr."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    with progress_bar() as show:
        yield show


def _plain_progress() -> Show:
    last = ""

    def show(done: int, total: int, message: str) -> None:
        nonlocal last
        line = cell(f"{done}/{total} {message}" if total else message)
        if line != last:
            echo(line, err=True)
        last = line

    return show
