"""`python -m forkserver FD ROOM`: forks servers and workers for tests, from a process that has imported them already.

To import a server takes more than a second of processor time, torch as much, and the tests start a hundred of them. A
fork runs the same as `python -m MODULE` or `python -c CODE` does, with an environment of its own; the
`sitecustomize` that this environment names is run anew, so sabotage works as in a new interpreter. Forks know the kinds
`plain` and `hostile`, whatever their path says. The socket FD carries JSON lines:

    test → forkserver   {"arguments": ["-m", "app.cli", "serve"], "environment": {…}, "output": path, "errors": path,
                         "before": statements}
    forkserver → test   {"pid": …}, and when it has ended {"pid": …, "returncode": …}

The forkserver ends with its socket. If clients can connect to it, each gets a fork that serves it, and the forkserver
ends with the process that started it. ROOM is blank: forks show their own command lines there. tests/forked.py talks to
the forkserver, and forks.py has what workers' forks do otherwise than users' workers.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import forks
import naps
import second_folder
from starlette.routing import NoMatchFound

from flopwatch import start

PRELOADED = (
    "alembic.command",
    "flopwatch.app.server.access",
    "flopwatch.app.cli.commands",
    "flopwatch.app.server.process",
    "flopwatch.app.store.queue.lease",
    "pysqlite3",
    "sqlalchemy.dialects.sqlite",
    "torch.distributed.launcher.api",
    "flopwatch.workers.agent.agent",
    "flopwatch.workers.slurm.worker",
)


def main(descriptor: int) -> None:
    """Serve forks until the socket ends."""
    parent = os.getppid()
    gc.disable()
    # The environment that it was started with has the kind `plain` on its path.
    second_folder.add(Path(__file__).parent / "hostile_kind")
    second_folder.use_long_names()
    for name in PRELOADED:
        importlib.import_module(name)
    naps.shorten()
    with contextlib.suppress(NoMatchFound):  # FastAPI builds routes when somebody looks for one
        importlib.import_module("flopwatch.app.main").ROUTES.url_path_for("nothing")
    importlib.import_module("flopwatch.workers.processes.warm").preload()
    gc.disable()
    assert threading.active_count() == 1, "a fork of several threads may deadlock"
    gc.freeze()
    server = socket.socket(fileno=descriptor)
    if server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        server = _accept(server, parent)
    wakeup, wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.set_inheritable(False)
    orders = server.makefile("rb", buffering=0)
    while True:
        ready, _, _ = select.select([server, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _report_ended(server)
        if server in ready:
            line = orders.readline()
            if not line:
                return
            order = json.loads(line)
            if (pid := os.fork()) == 0:
                _become(order, close=[server.fileno(), wakeup, wakeup_in])
            _send(server, pid=pid)


def _accept(listener: socket.socket, parent: int) -> socket.socket:
    """Fork for each client; returns in the forks, with the client's connection."""
    from workers.processes.linux import die_with_parent  # only now: `main` first prepares the import of `workers`

    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection.dup()


def _report_ended(server: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(server, pid=pid, returncode=os.waitstatus_to_exitcode(status))


def _send(server: socket.socket, **message: int) -> None:
    server.sendall(json.dumps(message).encode() + b"\n")


def _become(order: dict[str, Any], close: list[int]) -> NoReturn:
    """Run a module as its own program would, and end this process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in close:
            os.close(descriptor)
        for number, name in ((1, "output"), (2, "errors")):
            file = os.open(order[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(file, number)
            os.close(file)
        forks.become([sys.executable, *order["arguments"]], order["environment"])
        gc.enable()
        _run(order["arguments"], order["before"])
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        _leave(code)


def _run(arguments: list[str], before: str) -> None:
    """Run what an interpreter does with these arguments, after the statements `before`."""
    option, program, *others = arguments
    files = (Path(folder) / "sitecustomize.py" for folder in os.environ["PYTHONPATH"].split(os.pathsep))
    if (file := next(filter(Path.exists, files), None)) is not None:
        runpy.run_path(str(file))
    exec(before, {})
    if arguments == ["-m", "workers", "agent"]:
        forks.prepare()
    if option == "-m" and program in ("app.cli", "workers"):
        start.run(program, *others)
    elif option == "-m":
        sys.argv = [program, *others]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *others]
        exec(program, {"__name__": "__main__"})


def _code_of(end: SystemExit) -> int:
    """Return the exit code, as Python makes it of what was raised."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, call what is registered."""
    import atexit

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
