"""Commands that pause the queue, and tell what is in it and who uses it: sweeps, workers, pause, resume, usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import completing
from app.cli.common import AsJson, command
from app.cli.terminal import cell, echo, echo_line, first_of

if TYPE_CHECKING:
    from flopwatch import Flopwatch

ALL = "all"
MAX_WORKERS = 1000
CONNECTED = ("active", "unfit", "draining")
USED = ("user", "kind", "device", "attempts", "device_hours")
STANDING = ("user", "running_devices", "queued_jobs", "recent_device_hours")
Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Only jobs of this kind; may be repeated.", autocompletion=completing.kinds),
]


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


@command
def pause(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Stop further jobs from starting; running ones continue."""
    paused = server.paused_kinds()
    if kind is None:
        paused = ALL
    elif paused != ALL:
        paused = sorted({*paused, *kind})
    _set(server, paused, as_json=as_json)


@command
def resume(server: Flopwatch, *, kind: Kind = None, as_json: AsJson = False) -> None:
    """Let jobs start again after `flopwatch pause`."""
    from flopwatch import ClientError

    paused: list[str] | str = []
    if kind is not None:
        paused = server.paused_kinds()
        if paused == ALL:
            raise ClientError("All kinds are paused: `flopwatch resume` without --kind lets them go on.")
        paused = sorted(set(paused) - set(kind))
    _set(server, paused, as_json=as_json)


@command
def usage(
    server: Flopwatch,
    *,
    since: Annotated[str, typer.Option(metavar="WHEN", help="30d, 12h, 2026-03-01, or a time.")] = "30d",
    as_json: AsJson = False,
) -> None:
    """Show device hours by user, kind and device, and who has running or queued jobs now."""
    from app.cli.output import print_columns, print_json

    answer = server.usage(since)
    if as_json:
        print_json(answer)
        return
    print_columns(_heads(USED), [[row[name] for name in USED] for row in answer["data"]])
    if answer["now"]:
        echo()
        print_columns(_heads(STANDING), [[row[name] for name in STANDING] for row in answer["now"]])
        if any(row["recent_device_hours"] is not None for row in answer["now"]):
            echo("the user with the least recent device hours is next, among jobs of equal priority")


def _heads(columns: Sequence[str]) -> list[str]:
    return [name.replace("_", " ") for name in columns]


def _set(server: Flopwatch, kinds: list[str] | str, *, as_json: bool) -> None:
    from app.cli.output import print_json

    answer = server.set_paused_kinds(kinds)
    if as_json:
        print_json(answer)
        return
    paused = answer["kinds"]
    named = "all kinds" if paused == ALL else ", ".join(paused)
    echo(f"paused: {named}" if paused else "nothing is paused any more")
