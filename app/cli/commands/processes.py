"""Commands that are or start processes, or work on the database itself: up, serve, worker, run, backup, lease, …"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from app.cli import completing
from app.cli.common import DataDir, Fields, OwnCodeOptions, Preset, command, use_data_dir, warn_of_unknown_settings
from app.cli.terminal import echo, fail
from app.importing import program, without_collector

if TYPE_CHECKING:
    from app.settings import Settings
    from app.store.database.engine import Database

Host = Annotated[str | None, typer.Option(help="Address to listen on (FLOPWATCH_HOST).")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one (FLOPWATCH_PORT).")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Serve other hosts even without a token (FLOPWATCH_INSECURE).")
]

AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run code that users upload (FLOPWATCH_ALLOW_CODE): whoever reaches the server runs code as this user.",
    ),
]

LOOK_S = 0.1
PR_SET_PDEATHSIG = 1


@command
def up(
    host: Host = None,
    port: Port = None,
    *,
    insecure: Insecure = False,
    allow_code: AllowCode = False,
    data_dir: DataDir = None,
) -> None:
    """Run server and worker together until interrupted."""
    from app.settings import SECRETS

    use_data_dir(data_dir)
    _use(allow_code=allow_code)
    settings = _server_settings(host, port, insecure=insecure)
    stop_signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # as after `nohup`
            signal.signal(number, lambda received, _frame: stop_signals.append(received))
    children = {
        "server": _start("app.cli", "serve"),
        # A worker needs no secret of the server, and runs code that others wrote.
        "worker": _start("workers", "agent", without=SECRETS),
    }
    try:
        while not stop_signals and all(child.poll() is None for child in children.values()):
            time.sleep(LOOK_S)
        dead = [name for name, child in children.items() if child.poll() is not None]
        if not stop_signals:
            code = children[dead[0]].returncode
            how = (
                f"was killed by signal {-code} ({signal.strsignal(-code)})"
                if code < 0
                else f"ended with exit code {code}"
            )
            echo(f"error: the {dead[0]} {how}", err=True)
    finally:
        # The worker stops first, so that the server still shows how its job ends.
        for child in reversed(children.values()):
            _stop(child, settings.grace_s, stop_signals)
    if not stop_signals:
        raise typer.Exit(1)


@command
def serve(host: Host = None, port: Port = None, *, insecure: Insecure = False, data_dir: DataDir = None) -> None:
    """Run the server."""
    with without_collector():
        from app.server.process import listen

    use_data_dir(data_dir)
    settings = _server_settings(host, port, insecure=insecure)
    with _refused():
        code = listen(settings)
    raise typer.Exit(code)


@command
def worker(
    *,
    executor: Annotated[
        Literal["local", "slurm"], typer.Option(help="Where jobs run: on this host, or on nodes of a Slurm cluster.")
    ] = "local",
    slurm_settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's settings, for --executor slurm.")
    ] = None,
    one_job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run the job that a Slurm worker hands over in this file.")
    ] = None,
    allow_code: AllowCode = False,
    data_dir: DataDir = None,
) -> None:
    """Run a worker on this host, in place of this process, or one that submits jobs to a Slurm cluster."""
    if (executor == "slurm") != (slurm_settings is not None):
        raise typer.BadParameter("--executor slurm and --slurm-settings FILE go together")
    if one_job is not None and executor != "local":
        raise typer.BadParameter("--one-job runs on this host: leave --executor out")
    use_data_dir(data_dir)
    _use(allow_code=allow_code)
    warn_of_unknown_settings()
    if one_job is not None:
        _become_workers("one-job", str(one_job))
    if slurm_settings is not None:
        _become_workers("slurm", str(slurm_settings))
    _become_workers("agent")


@command
def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="KIND|SPEC.json",
            help="A file with the spec, - for standard input; or the kind of job.",
            autocompletion=completing.kinds,
        ),
    ],
    fields: Fields = None,
    *,
    preset: Preset = None,
    own_code: OwnCodeOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, not a table.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the job's files; none is overwritten.")] = Path(),
    data_dir: DataDir = None,
) -> None:
    """Run one job without server and queue, in this process, so that profilers can wrap it."""
    from app.cli.specs import local

    use_data_dir(data_dir)
    warn_of_unknown_settings()
    named = {name: value for name, value in vars(own_code).items() if name != "code"}
    spec, uploads = local(source, fields or [], preset, named, own_code.code)
    files = [word for file in uploads for word in ("--code", _as_file(file.content))]
    _become_workers("run", _as_file(spec.encode()), "--output", str(output), *files, *(["--json"] if as_json else []))


@command
def backup(
    path: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")], data_dir: DataDir = None
) -> None:
    """Write a consistent copy of the database to a file, while server and workers continue. Artifacts are not
    included: copy their folder, or their object store, afterwards."""
    from app.store.database.engine import Database
    from app.store.database.moved import refuse_elsewhere

    if path.exists():
        raise typer.BadParameter(f"{path} exists already; backups are never overwritten.")
    use_data_dir(data_dir)
    settings = _settings()
    try:
        with _refused():
            refuse_elsewhere(settings)
            # open_database would migrate, and a backup before an upgrade must not upgrade.
            database = Database(settings.resolved_database_url, busy_timeout_s=settings.busy_timeout_s)
            with closing(database):
                database.backup(path)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    files = settings.object_store_url or settings.artifacts_dir
    echo(f"{path}: {path.stat().st_size} bytes. Copy {files} as well to keep the files of jobs.")


@command
def prune(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    claim_files: Annotated[
        bool,
        typer.Option(
            "--claim-files",
            help="First make the database the owner of the files, in place of one that nobody uses any more: it then "
            "removes files that it does not know.",
        ),
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Delete what is older than the FLOPWATCH_KEEP_… settings allow, as the server does by itself.

    Works on the database itself, with or without a server.
    """
    from app.server.access import refuse_second_server
    from app.store.database.engine import open_existing
    from app.store.database.slices import Slices
    from app.store.files.opening import open_files
    from app.store.keeping.pruning import Pruning, Retention

    if dry_run and claim_files:
        raise typer.BadParameter("--dry-run changes nothing, so leave --claim-files out")
    use_data_dir(data_dir)
    settings = _settings()
    with _refused():
        if claim_files:
            refuse_second_server(settings)
        with closing(open_existing(settings)) as database:
            if claim_files:
                _refuse_living_workers(database)
            files = open_files(settings, database, claim=claim_files, dry=dry_run)
            pruning = Pruning(Slices(database), files, Retention.of(settings))
            if dry_run:
                echo(f"would delete: {pruning.plan().in_words()}")
                return
            echo(f"deleted: {pruning.run().in_words()}")
            database.checkpoint()
            echo(f"{database.backend.place}: {database.backend.size} bytes")


def _refuse_living_workers(database: Database) -> None:
    """Raise Conflict if workers of this database run, also on other hosts."""
    from app.errors import Conflict
    from app.store.queue.registration import living_workers

    with database.read() as connection:
        living = living_workers(connection)
    if living:
        raise Conflict(f"Workers run ({', '.join(living[:3])}): stop them first.")


@command
def move(
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="postgresql+psycopg://user@host/database, empty; or s3://bucket/prefix (gs://, az://) for files.",
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the folder's database be used again, without what came later.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Copy the database of a data folder to PostgreSQL, while no server and no worker runs, or its files to an object
    store; the folder keeps its rows and files. No process uses a database that has moved."""
    from app.server.access import refuse_second_server
    from app.settings import OBJECT_STORES
    from app.store.database.engine import open_database, open_existing
    from app.store.database.moving import copy_everything, refuse_other_moves
    from app.store.files.opening import open_files

    use_data_dir(data_dir)
    settings = _settings()
    if (to is None) != undo:
        raise typer.BadParameter("give --to, or --undo")
    if to is None:
        _undo_move(settings)
        return
    if to.startswith(tuple(f"{scheme}://" for scheme in OBJECT_STORES)):
        _copy_files(settings, to)
        return
    if settings.database_url == to:  # set already for server and workers; what moves is the folder's
        settings = settings.model_copy(update={"database_url": None})
    with _refused(), closing(open_existing(settings)) as source:
        refuse_other_moves(source, to)
        refuse_second_server(settings)
        _refuse_living_workers(source)
        there = settings.model_copy(update={"database_url": to})
        with closing(open_database(there)) as target:
            with target.read() as connection:  # what keeps it from owning the files is raised before the copy
                target.backend.identity(connection)
            counts = copy_everything(source, target)
            place = target.backend.place
            echo("\n".join(f"{name}: {number}" for name, number in counts.items()))
            echo(f"all rows are in {place}: set FLOPWATCH_DATABASE_URL for server and workers.")
            open_files(there, target, claim=True)
    echo("Files stay where they are.")


def _undo_move(settings: Settings) -> None:
    from app.store.database.engine import open_existing
    from app.store.database.moved import unmark

    with _refused():
        folders = settings.model_copy(update={"database_url": None})
        with closing(open_existing(folders, may_have_moved=True)) as database, database.write() as connection:
            was_moved, place = unmark(connection), database.backend.place
    if not was_moved:
        fail(f"{place} has not moved.")
    echo(f"{place} may be used again. If the other database is gone, take its files: flopwatch prune --claim-files")


def _copy_files(settings: Settings, to: str) -> None:
    """Copy the files of a folder to an object store, also while others run, and say how many."""
    from app.errors import CannotRunHere
    from app.settings import Settings
    from app.store.database.engine import open_existing
    from app.store.files.artifacts import ArtifactFiles

    with _refused():
        if settings.object_store_url is not None:
            raise CannotRunHere("The files are on an object store already (FLOPWATCH_ARTIFACTS_URL).")
        Settings.from_environment(artifacts_url=to)
        from app.store.files.objects import ObjectFiles, copy_files

        with closing(open_existing(settings)) as database:
            store = ObjectFiles(to, database)
            store.refuse_foreign(database, is_copy=True)
            copied = copy_files(ArtifactFiles(settings.artifacts_dir), store, database)
    echo(f"{copied.copied} files copied, {copied.present} were there; {copied.lost} are damaged or not in the folder.")
    echo("Stop server and workers, repeat this for what came meanwhile, and set FLOPWATCH_ARTIFACTS_URL for both.")


@contextmanager
def _refused() -> Iterator[None]:
    from app.errors import FlopwatchError

    try:
        yield
    except FlopwatchError as error:
        fail(f"{error.title}: {error.detail}")


def _settings(**changes: object) -> Settings:
    """Read the environment's settings; `changes` are written back to the environment, for this process's children."""
    from app.errors import CannotRunHere
    from app.settings import Settings

    os.environ.update({name: str(value) for name, value in changes.items() if value is not None})
    warn_of_unknown_settings()
    try:
        return Settings.from_environment()
    except CannotRunHere as error:
        fail(error.detail)


def _use(*, allow_code: bool) -> None:
    """Let this process and its children run uploaded code, if the option says so; else the environment decides."""
    if allow_code:
        os.environ["FLOPWATCH_ALLOW_CODE"] = "true"


def _server_settings(host: str | None, port: int | None, *, insecure: bool) -> Settings:
    """Return a server's settings, after refusing access that is open by mistake and a store of files that cannot be
    used, and making or migrating the database."""
    from app.server.access import refuse_open_access, refuse_second_server
    from app.store.database.engine import is_missing, open_database
    from app.store.database.private import UMASK
    from app.store.files.opening import open_files
    from app.store.queue.lease import with_agreed_lease

    os.umask(UMASK)
    settings = _settings(FLOPWATCH_HOST=host, FLOPWATCH_PORT=port, FLOPWATCH_INSECURE=insecure or None)
    with _refused():
        if is_missing(settings):  # then nothing is made
            refuse_open_access(settings, None)
        refuse_second_server(settings)
        _check_address(settings.host, settings.port)
        with closing(open_database(settings)) as database:
            refuse_open_access(settings, database)
            with_agreed_lease(database, settings)
            open_files(settings, database, dry=True)  # the server itself opens them, and warns
    return settings


def _check_address(host: str, port: int) -> None:
    """Raise CannotRunHere if no server can listen there, before the server itself has started."""
    import asyncio

    from app.errors import CannotRunHere

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host or None, port, start_serving=False)).close()

    try:
        asyncio.run(listen())  # as uvicorn does, which passes over what the kernel lacks, such as IPv6
    except OSError as error:
        where = f"{host or 'all addresses'}, port {port}"
        raise CannotRunHere(
            f"No server can listen at {where}: {error.strerror}. Choose another place with --host and --port; "
            "port 0 is a free one."
        ) from error


def _as_file(content: bytes) -> str:
    """Return a path at which the program that replaces this process can read the bytes; nothing is left on the disk."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return f"/dev/fd/{descriptor}"


def _become_workers(*arguments: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, program("workers", *arguments))  # noqa: S606


def _start(module: str, *arguments: str, without: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a child with the environment of this process, except the variables named `without`."""
    from app.settings import unknown_variables

    # In a group of its own: an interrupt from the terminal reaches `up` alone, which stops them in order.
    # This process has already warned of unknown settings.
    left_out = {*without, *unknown_variables(os.environ)}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.Popen(program(module, *arguments), env=environment, process_group=0, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    """Let the kernel terminate this process if `up` dies without stopping its children, as by kill -9. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(child: subprocess.Popen[bytes], grace_s: float, stop_signals: Sequence[int]) -> None:
    """Terminate a child and wait; passes every further signal on to it, since a second one hurries a worker."""
    # The worker's own grace period, and a moment to record how its job ended.
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
