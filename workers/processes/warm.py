"""The warm parent: a process with torch imported, from which keepers are forked in milliseconds.

It is exec'd, not forked from the agent, stays single-threaded, and touches no tensor, NVML, database or CUDA: a fork
of it must be as good as a new process. It reads one message per unit from its socket, the file descriptors
(control, messages, log, locks…) in its ancillary data, and ends with the socket: then the agent is dead, and the
keepers see that for themselves.
"""

import gc
import importlib
import os
import pkgutil
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

from workers.processes import keeper, last_words
from workers.processes.child import run_request
from workers.processes.linux import adopt_orphans, kill_all, reap

MAX_DESCRIPTORS = 64
READY = b"R"
FORK = b"F"
PID = struct.Struct("=i")
"""Answer to each FORK: the keeper's pid, or NOT_FORKED."""
NOT_FORKED = -1

# torch._dynamo is preloaded because optimizers and checkpointing import it, which takes more than a second.
OURS = ("app.specs", "workers.jobs", "workers.model", "workers.measure", "kernels")
PREFIX = __name__.removesuffix("workers.processes.warm")
"""The begin of our packages' names in this process: see flopwatch/packages.py."""
PRELOADED = ("torch", "torch._dynamo", *(f"{PREFIX}{name}" for name in OURS))


def preload() -> None:
    """Import the modules that every unit needs, so that forks have them.

    NumPy's OpenBLAS would start a thread per core when it is loaded; torch, which brings its own BLAS, does not. The
    garbage collector would look through all that was imported again and again, and find nothing.
    """
    set_by_user = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    try:
        _import_all()
    finally:
        gc.enable()
        del os.environ["OPENBLAS_NUM_THREADS"]
        if set_by_user is not None:
            os.environ["OPENBLAS_NUM_THREADS"] = set_by_user


def _import_all() -> None:
    for name in PRELOADED:
        module = importlib.import_module(name)
        if name.startswith(f"{PREFIX}workers."):
            for info in pkgutil.walk_packages(module.__path__, f"{name}."):
                importlib.import_module(info.name)


def main(descriptor: int) -> None:
    """Serve forks on the socket until it closes."""
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles a terminal's Ctrl-C
    preload()
    if (threads := sum(1 for _ in Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError(f"the warm parent has {threads} threads after its imports: forks of it could deadlock")
    # The forks' garbage collector then neither scans nor copies what lives here: half a second in each.
    gc.collect()
    gc.freeze()
    wakeup, wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = socket.socket(fileno=descriptor)
    server.set_inheritable(False)
    keepers: set[int] = set()
    server.sendall(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is server:
                    order, descriptors, _, _ = socket.recv_fds(server, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
                    if order != FORK:
                        return
                    pid = _fork_keeper(descriptors, close=[descriptor, wakeup, wakeup_in])
                    server.sendall(PID.pack(pid))
                    keepers |= {pid} - {NOT_FORKED}
                else:
                    os.read(wakeup, 4096)
            ended = reap()
            if keepers & ended.keys():
                keepers -= ended.keys()
                # This process adopts the processes of a unit whose keeper was killed.
                kill_all(spare=keepers)


def _fork_keeper(descriptors: list[int], close: list[int]) -> int:
    try:
        pid = os.fork()
    except OSError as error:
        # The agent gets NOT_FORKED; this process and the other units continue.
        sys.stderr.write(f"flopwatch: cannot start a process: {error}\n")
        pid = NOT_FORKED
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in close:
            os.close(descriptor)
        os.setsid()
        control, messages, log, *_locks = descriptors
        start = keeper.fork_child(lambda request: _run(request, messages, log), close=[control])
        keeper.keep(socket.socket(fileno=control), messages, log, start)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(request: keeper.Request, messages: int, log: int) -> int:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    last_words.keep(Path(request.scratch))
    return run_request(request, messages)
