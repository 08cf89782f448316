"""Commands that list sweeps and workers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import completing
from app.cli.common import AsJson, command
from app.cli.terminal import cell, echo, echo_line, first_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flopwatch import Flopwatch

MAX_WORKERS = 1000
CONNECTED = ("active", "unfit", "draining")


@command
def sweeps(
    server: Flopwatch,
    sweep_id: Annotated[
        int | None, typer.Argument(metavar="[ID]", help="One sweep, by itself.", autocompletion=completing.sweep_ids)
    ] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List sweeps, newest first: the grid of each, and how many of its jobs are in each state; or show one."""
    from app.cli.output import counts_text, grid_text, print_columns, print_json, print_sweep
    from flopwatch.text.times import age

    if sweep_id is not None:
        sweep = server.sweep_state(sweep_id)
        print_json(sweep) if as_json else print_sweep(sweep)
        return
    listed = first_of(server.list_sweeps(limit + 1), limit)
    if as_json:
        print_json(listed)
        return
    rows = [
        (
            sweep["id"],
            sweep["base"].get("kind"),
            grid_text(sweep),
            counts_text(sweep["counts"]),
            age(sweep["created_at"]),
            sweep["name"],
        )
        for sweep in listed
    ]
    print_columns(("id", "kind", "grid", "jobs", "age", "name"), rows)


@command
def workers(
    server: Flopwatch,
    *,
    everyone: Annotated[bool, typer.Option("--all", help="Also those that stopped or were lost.")] = False,
    as_json: AsJson = False,
) -> None:
    """List connected workers: their devices, the jobs on them, and when they were last seen."""
    from app.cli.output import print_columns, print_json
    from flopwatch.text.times import age, moment
    from flopwatch.text.validity import RECENT_JOBS, noisy_host

    listed = server.list_workers(limit=MAX_WORKERS)
    chosen = [worker for worker in listed if everyone or worker["state"] in CONNECTED]
    if as_json:
        print_json(chosen)
        return
    rows = [
        (
            worker["id"],
            worker["state"],
            _devices(worker["devices"]),
            ", ".join(f"job {job_id}" for job_id in worker["job_ids"]) or None,
            age(worker["last_seen_at"]),
            worker["versions"].get("flopwatch"),
            worker["versions"].get("torch"),
        )
        for worker in chosen
    ]
    print_columns(("id", "state", "devices", "runs", "seen", "flopwatch", "torch"), rows)
    recent = server.list_jobs(state="succeeded", limit=RECENT_JOBS)
    for worker in chosen:
        if unfit := worker["unfit"]:
            at = unfit["next_try_at"]
            when = f"next try at {moment(at)}" if at else "until it is started again"
            echo_line(f"{cell(worker['id'])}: unfit ({unfit['code']}), {when}: {cell(unfit['reason'])}")
        if noise := noisy_host(job["validity"] for job in recent if job["worker_id"] == worker["id"]):
            echo_line(f"{cell(worker['id'])}: {noise}")
    if not rows:
        echo("no worker is connected: if none is starting, start one with `flopwatch worker`", err=True)
    if len(listed) > len(chosen):
        echo(f"{len(listed) - len(chosen)} stopped or lost workers hidden (--all shows them)", err=True)


def _devices(devices: Sequence[dict[str, Any]]) -> str:
    """Write devices in short: "2x NVIDIA H200", "64 CPUs"."""
    names = [device.get("name") or f"{device.get('count', 1)} CPUs" for device in devices]
    counts = Counter(names)
    return ", ".join(name if name.endswith(" CPUs") else f"{count}x {name}" for name, count in counts.items())
