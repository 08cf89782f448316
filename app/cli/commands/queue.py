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
    from app.cli.output import counts_text, grid_text, print_json, print_list, print_sweep
    from flopwatch.text.times import age

    if sweep_id is not None:
        sweep = server.sweep_state(sweep_id)
        print_json(sweep) if as_json else print_sweep(sweep)
        return
    columns = {
        "id": "id",
        "kind": lambda sweep: sweep["base"].get("kind"),
        "grid": grid_text,
        "jobs": lambda sweep: counts_text(sweep["counts"]),
        "age": lambda sweep: age(sweep["created_at"]),
        "name": "name",
    }
    print_list(first_of(server.list_sweeps(limit + 1), limit), columns, as_json=as_json)


@command
def workers(
    server: Flopwatch,
    *,
    everyone: Annotated[bool, typer.Option("--all", help="Also those that stopped or were lost.")] = False,
    as_json: AsJson = False,
) -> None:
    """List connected workers: their devices, the jobs on them, and when they were last seen."""
    from app.cli.output import print_list
    from flopwatch.text.times import age, moment
    from flopwatch.text.validity import RECENT_JOBS, noisy_host

    listed = server.list_workers(limit=MAX_WORKERS)
    chosen = [worker for worker in listed if everyone or worker["state"] in CONNECTED]
    columns = {
        "id": "id",
        "state": "state",
        "devices": lambda worker: _devices(worker["devices"]),
        "runs": lambda worker: ", ".join(f"job {job_id}" for job_id in worker["job_ids"]) or None,
        "seen": lambda worker: age(worker["last_seen_at"]),
        "flopwatch": lambda worker: worker["versions"].get("flopwatch"),
        "torch": lambda worker: worker["versions"].get("torch"),
    }
    print_list(chosen, columns, as_json=as_json)
    if as_json:
        return
    recent = server.list_jobs(state="succeeded", limit=RECENT_JOBS)
    for worker in chosen:
        if unfit := worker["unfit"]:
            at = unfit["next_try_at"]
            when = f"next try at {moment(at)}" if at else "until it is started again"
            echo_line(f"{cell(worker['id'])}: unfit ({unfit['code']}), {when}: {cell(unfit['reason'])}")
        if noise := noisy_host(job["validity"] for job in recent if job["worker_id"] == worker["id"]):
            echo_line(f"{cell(worker['id'])}: {noise}")
    if not chosen:
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
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="30d, 12h, 2026-03-01, or a time: from its whole hour on.")
    ] = "30d",
    as_json: AsJson = False,
) -> None:
    """Show device hours by user, kind and device, and who has running or queued jobs now."""
    from app.cli.output import print_json, print_list

    answer = server.usage(since)
    if as_json:
        print_json(answer)
        return
    print_list(answer["data"], {name.replace("_", " "): name for name in USED})
    if answer["now"]:
        echo()
        print_list(answer["now"], {name.replace("_", " "): name for name in STANDING})
        if any(row["recent_device_hours"] is not None for row in answer["now"]):
            echo("the user with the least recent device hours is next, among jobs of equal priority")


def _set(server: Flopwatch, kinds: list[str] | str, *, as_json: bool) -> None:
    from app.cli.output import print_json

    answer = server.set_paused_kinds(kinds)
    if as_json:
        print_json(answer)
        return
    paused = answer["kinds"]
    named = "all kinds" if paused == ALL else ", ".join(paused)
    echo(f"paused: {named}" if paused else "nothing is paused any more")
