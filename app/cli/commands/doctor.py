"""`flopwatch doctor`: examines this host, and says what works, what does not, and what to do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.common import DataDir, command, use_data_dir
from app.cli.terminal import cell, echo, echo_json
from app.importing import program

if TYPE_CHECKING:
    from app.checkup import Finding
    from app.settings import Settings

WORKER_S = 600
"""Seconds for what a worker needs: the first time, kernels are compiled."""
SERVER_S = 5.0
SIGNS = {"works": "ok", "absent": "-", "broken": "FAULT"}


@command
def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    slurm_settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also examine the Slurm cluster with these settings.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Examine this host: what works, what does not, and what to do. Exit code 1 if something is broken."""
    use_data_dir(data_dir)
    findings = []
    for finding in _findings(slurm_settings):
        findings.append(finding)
        if not as_json:
            echo(f"{SIGNS[finding.state]:<6}{finding.name:<13}{cell(finding.found)}")
            if finding.cure:
                echo(f"{'':<19}cure: {cell(finding.cure)}")
    faults = sum(finding.state == "broken" for finding in findings)
    if as_json:
        body = {"ok": not faults, "findings": [finding.as_json() for finding in findings]}
        echo_json(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        echo(f"\n{faults or 'no'} fault{'' if faults == 1 else 's'} found")
    raise typer.Exit(1 if faults else 0)


def _findings(slurm_settings: Path | None) -> Iterator[Finding]:
    from app.checkup import absent, broken
    from app.errors import CannotRunHere
    from app.settings import Settings, unknown_variables
    from app.store.checking import examine

    for warning in unknown_variables(os.environ).values():
        yield absent("settings", warning)
    try:
        settings = Settings.from_environment()
    except CannotRunHere as error:
        yield broken("settings", error.detail, "set it to a value that docs/settings.md allows, or unset it")
    else:
        yield from examine(settings)
        yield from _server(settings)
    yield from _worker(slurm_settings)


def _server(settings: Settings) -> Iterator[Finding]:
    import httpx

    from app.checkup import absent, broken, works
    from flopwatch import address
    from flopwatch.connection import is_here
    from flopwatch.version import own_version

    url = os.environ.get("FLOPWATCH_URL") or address.read(settings.data_dir)
    if url is None:
        yield absent("server", "no server on this host, and FLOPWATCH_URL is not set")
        return
    own = own_version()
    try:
        answer = httpx.get(f"{url.rstrip('/')}/healthz", timeout=SERVER_S, trust_env=not is_here(url))
        version = answer.raise_for_status().json()["version"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, ImportError) as error:
        cure = "start it (`flopwatch serve`), or set FLOPWATCH_URL to where it runs"
        likewise = "" if isinstance(error, httpx.TransportError) else " as Flopwatch does"
        yield broken("server", f"{url} does not answer{likewise}: {error or type(error).__name__}", cure)
        return
    if version != own:
        cure = "update so that server, workers and clients have one version"
        yield absent("server", f"{url} is version {version}, and this is {own}", cure)
    else:
        yield works("server", f"{url} answers, version {version}")


def _worker(slurm_settings: Path | None) -> Iterator[Finding]:
    """Ask a process of the worker's, since this one imports neither torch nor kernels. A crash there is a finding."""
    from app.checkup import Finding, broken

    # No colour, no settings: what it prints is one finding a line.
    command = [*program("workers", "doctor"), *([str(slurm_settings)] if slurm_settings else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    last = "its start"
    try:
        output, errors = process.communicate(timeout=WORKER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    for line in output.splitlines():
        try:
            finding = Finding(**json.loads(line))
        except (ValueError, TypeError):
            continue  # somebody else's output
        last = finding.name
        yield finding
    if process.returncode != 0:
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = errors.strip().splitlines()[-1:] or ["no message"]
        cure = f"run `{shlex.join(program('workers', 'doctor'))}` to see all that it prints"
        yield broken("worker", f"the check after {last!r} {how}: {said[0]}", cure)
