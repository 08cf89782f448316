"""Commands that are or start processes: up, serve, worker, run, backup."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from app.settings import Settings

Host = Annotated[str | None, typer.Option(help="Address to listen on (FLOPWATCH_HOST).")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one (FLOPWATCH_PORT).")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Serve other hosts even without a token (FLOPWATCH_INSECURE)."),
]

LOOK_S = 0.1
PR_SET_PDEATHSIG = 1


def serve(host: Host = None, port: Port = None, *, insecure: Insecure = False) -> None:
    """Run the server."""
    from app.cli.server import listen

    settings = _server_settings(host, port, insecure=insecure)
    raise typer.Exit(listen(settings))


def worker() -> None:
    """Run a worker on this host; it takes over this very process."""
    _become_workers("agent")


def run(
    spec: Annotated[str, typer.Argument(metavar="SPEC.json", help="A file with the spec; - reads standard input.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, not a table.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the job's files.")] = Path(),
) -> None:
    """Run one job without server and queue, in this very process id, so that profilers can wrap it."""
    _become_workers("run", spec, "--output", str(output), *(["--json"] if as_json else []))


def up(host: Host = None, port: Port = None, *, insecure: Insecure = False) -> None:
    """Run server and worker together until interrupted."""
    settings = _server_settings(host, port, insecure=insecure)
    stop_signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stop_signals.append(received))
    children = {
        "server": _start("app.cli", "serve"),
        # A worker asks nobody for access, and runs what others wrote.
        "worker": _start("workers", "agent", without="FLOPWATCH_API_TOKEN"),
    }
    try:
        while not stop_signals and all(child.poll() is None for child in children.values()):
            time.sleep(LOOK_S)
        dead = [name for name, child in children.items() if child.poll() is not None]
        if not stop_signals:
            typer.echo(f"error: the {dead[0]} ended with exit code {children[dead[0]].returncode}", err=True)
    finally:
        # The worker stops first, so that the server still shows how its job ends.
        for child in reversed(children.values()):
            _stop(child, settings.grace_s, stop_signals)
    if not stop_signals:
        raise typer.Exit(1)


def backup(path: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")]) -> None:
    """Copy the database to a file as of one moment, while server and workers go on. Artifacts are not in it."""
    from app.errors import FlopwatchError
    from app.store.engine import Database

    if path.exists():
        raise typer.BadParameter(f"{path} exists already; backups are never overwritten.")
    settings = _settings()
    try:
        # open_database would migrate, and a backup before an upgrade must not upgrade.
        database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s)
        try:
            database.backup(path)
        finally:
            database.close()
    except FlopwatchError as error:
        fail(f"{error.title}: {error.detail}")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    typer.echo(f"{path}: {path.stat().st_size} bytes. Copy {settings.artifacts_dir} as well to keep the files of jobs.")


COMMANDS = (up, serve, worker, run, backup)


def fail(message: str) -> NoReturn:
    """Print an error and exit."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _settings(**changes: object) -> Settings:
    """Read the environment's settings; `changes` are written back to the environment, for this process's children."""
    from app.errors import InvalidEnvironment
    from app.settings import Settings

    os.environ.update({name: str(value) for name, value in changes.items() if value is not None})
    try:
        return Settings.from_environment()
    except InvalidEnvironment as error:
        fail(error.detail)


def _server_settings(host: str | None, port: int | None, *, insecure: bool) -> Settings:
    """Return a server's settings; refuse access that is open by oversight, and make or migrate the database."""
    from app.cli.server import refuse_open_access
    from app.errors import FlopwatchError
    from app.store.engine import open_database
    from app.store.private import UMASK

    os.umask(UMASK)
    settings = _settings(FLOPWATCH_HOST=host, FLOPWATCH_PORT=port, FLOPWATCH_INSECURE=insecure or None)
    try:
        refuse_open_access(settings)
        open_database(settings).close()
    except FlopwatchError as error:
        fail(f"{error.title}: {error.detail}")
    return settings


def _become_workers(*arguments: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "workers", *arguments])  # noqa: S606


def _start(module: str, *arguments: str, without: str = "") -> subprocess.Popen[bytes]:
    """A child with the variables of this process but the one named `without`."""
    # In a group of its own: an interrupt from the terminal reaches `up` alone, which stops them in order.
    command = [sys.executable, "-m", module, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != without}
    return subprocess.Popen(command, env=environment, process_group=0, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    """Let the kernel terminate this process if `up` dies without stopping its children, as by kill -9. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(child: subprocess.Popen[bytes], grace_s: float, stop_signals: Sequence[int]) -> None:
    """End a child, patiently; pass on every further signal to this process, since a second one hurries a worker."""
    # The worker's own grace, and a moment to write down how its job ended.
    deadline = time.monotonic() + 2 * grace_s + 5
    sent = len(stop_signals)
    child.terminate()
    while child.poll() is None:
        if time.monotonic() >= deadline:
            child.kill()
        elif len(stop_signals) > sent:
            sent = len(stop_signals)
            child.terminate()
        time.sleep(LOOK_S)
