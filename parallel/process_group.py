"""Starts the ranks of one job on this host, or on several nodes, and ends them together.

    results = launch(train, {"steps": 10}, world_size=2, backend="gloo", folder=logs)

calls `train(rank, {"steps": 10})` in two new processes, in each of which the default process group is initialised, and
returns the calls' results. torch's elastic launcher starts the processes; they meet at 127.0.0.1, at a port that the
kernel chooses, so jobs on one host cannot meet each other's. Each rank is connected to the launching process by a
socket, over which it sends finished steps, reports and its result. When one rank raises, dies, or makes no step in
time, all are killed at once: the others may wait for it in a collective operation, where no signal handler would run.

Ranks inherit the environment, so settings such as NCCL_NVLS_ENABLE reach them. A rank's standard output and error are
in `folder`, in `rank-0.log` and so on. A rank dies with the process that launched it.

With `nodes`, this host is node 0 and has the first ranks; the others call `parallel.node_ranks.serve_node`. Ranks then
connect by TCP, and torch's rendezvous is at node 0.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import json
import logging
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kernels.clock import now_s

from .nodes import Nodes, RemoteNode, accepted, interface_to
from .stacks import SIGNAL

if TYPE_CHECKING:
    import torch

Plain: TypeAlias = "bool | int | float | str | list[Plain] | Mapping[str, Plain] | None"
"""Plain data: values that JSON can represent."""

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""The type of device that each backend is used for."""
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 60.0
STACK_DUMP_S = 0.5
"""Seconds in which ranks log their stacks before they are killed for a timeout."""
END_S = 10.0
"""Seconds that killed ranks may take to end."""
CAUSE_S = 0.3
"""Seconds after a failure in which to wait for an earlier failure of another rank, its cause."""
LOG_TAIL_BYTES = 8000
MAX_ERROR = 4000
"""Most characters of a rank's error."""
REQUEST, LOG = "PARALLEL_RANK_REQUEST", "PARALLEL_RANK_LOG"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where NCCL and torch make files; none are made here
SHARED_MEMORY_NAMES = ("nccl-", "torch_", "gloo")
PR_SET_PDEATHSIG = 1


class RanksFailed(Exception):
    """A rank raised, died or stopped, and all were ended.

    Attributes:
        rank: The rank at fault; None if it cannot be determined.
        reason: Its fault, in words.
        trace: Its traceback, or "".
        log: The end of its log, or "".
        log_file: Its log.
    """

    def __init__(
        self, rank: int | None, reason: str, *, trace: str = "", log: str = "", log_file: Path | None = None
    ) -> None:
        self.rank, self.reason, self.trace, self.log, self.log_file = rank, reason, trace, log, log_file
        who = "the ranks" if rank is None else f"rank {rank}"
        details = "".join(f"\n{text.rstrip()}" for text in (trace or log,) if text)
        where = f" (log: {log_file})" if log_file is not None else ""
        super().__init__(f"{who} {reason}{where}{details}")


class RanksTimedOut(RanksFailed):
    """The ranks did not start, or made no step, within their time."""


@dataclass(frozen=True)
class Rank:
    """The first argument of a rank's function: the rank's identity, and its connection to the launching process."""

    index: int
    world_size: int
    backend: str
    device: torch.device
    _channel: Connection = field(repr=False)

    def step_done(self) -> None:
        """Report that a step is done. After the first step, each must follow within the step's timeout."""
        _send(self._channel, "step", None)

    def report(self, message: Plain) -> None:
        """Send plain data to the launching process, which passes it to `reported`."""
        _send(self._channel, "report", message)


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a launch meet."""

    address: str | list[Any]
    """Where ranks connect: the name of a socket on this host; with several nodes, node 0's address and port."""
    key: str
    """The secret by which connections prove that they belong to the launch, in hexadecimal digits."""
    nodes: int
    ranks: int
    """Ranks of one node."""
    run_id: str
    port: int
    """The port of torch's rendezvous; 0: any, for one node."""


@dataclass(frozen=True)
class LaunchRequest:
    """The data that a rank needs to begin, as one line of JSON in its environment. A node gets it, too."""

    rendezvous: Rendezvous
    function: str
    path: list[str]
    parent: int
    backend: str
    threads: int | None
    start_timeout_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> LaunchRequest:
        content = json.loads(text)
        return cls(**{**content, "rendezvous": Rendezvous(**content["rendezvous"])})


def launch(
    function: Callable[..., Plain],
    *arguments: Plain,
    world_size: int,
    backend: str,
    folder: Path | str,
    start_timeout_s: float = START_TIMEOUT_S,
    step_timeout_s: float = STEP_TIMEOUT_S,
    reported: Callable[[int, Any], None] | None = None,
    nodes: Nodes | None = None,
    met: Callable[[list[Any]], None] | None = None,
) -> list[Any]:
    """Call `function(rank, *arguments)` in `world_size` new processes, and wait for all of them.

    Args:
        function: A function of a module, which the ranks import by its name; its first argument is a Rank.
        arguments: Plain data.
        world_size: Number of ranks; with nccl, each has the GPU of its own number.
        backend: "gloo" for CPUs or "nccl" for GPUs.
        folder: For the logs; made if it is missing.
        start_timeout_s: Seconds from the start to each rank's first `step_done` (or its return): for imports,
            compilation and warm-up.
        step_timeout_s: Seconds between two `step_done` of a rank, and from the last one to its return, once all ranks
            have made their first step.
        reported: Called in this thread, with the rank's index and what it reported.
        nodes: The nodes on which the ranks run, as many on each; None: this host alone.
        met: Called in this thread, with what the other nodes told about themselves, before the ranks begin.

    Returns:
        The result of each rank's function, in the order of ranks, after a round trip through JSON: tuples become lists.

    Raises:
        ValueError: an argument is out of range or not plain data, or the ranks could not import the function.
        RanksFailed: a rank raised or died. RanksTimedOut: it made no step in time.
    """
    count = 1 if nodes is None else nodes.count
    _check(world_size, backend, start_timeout_s, step_timeout_s, count)
    text = _to_json(list(arguments), "arguments")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(world_size):
        log_file(folder, index).unlink(missing_ok=True)
    with _listening(world_size, nodes) as (listener, address, key):
        port = 0 if nodes is None else nodes.free_port()
        rendezvous = Rendezvous(address, key, count, world_size // count, secrets.token_hex(8), port)
        threads = _threads_per_rank(rendezvous.ranks, backend)
        request = LaunchRequest(
            rendezvous, _name_of(function), search_path(), os.getpid(), backend, threads, start_timeout_s
        )
        elastic = Elastic(request, folder)
        ranks = _Ranks(request, folder, text, step_timeout_s, reported or (lambda _rank, _message: None))
        elastic.start()
        try:
            ranks.connect(listener, elastic, met or (lambda _facts: None))
            ranks.listen()
        finally:
            ranks.end()
            elastic.join(END_S)
    return [json.loads(ranks.results[index]) for index in range(world_size)]


@contextmanager
def _listening(world_size: int, nodes: Nodes | None) -> Iterator[tuple[Listener, str | list[Any], str]]:
    """Listen for the ranks, and for other nodes if there are any; yields the listener, its address and the key."""
    if nodes is None:
        name, key = f"flopwatch-{secrets.token_hex(16)}", secrets.token_bytes(32)
        with Listener(f"\0{name}", family="AF_UNIX", backlog=world_size, authkey=key) as listener:
            yield listener, name, key.hex()
        return
    with nodes.listener(world_size + nodes.count) as listener:
        yield listener, list(listener.address), nodes.key


def search_path() -> list[str]:
    """Return where this process looks for modules, so that its ranks look there, too."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def _check(world_size: int, backend: str, start_timeout_s: float, step_timeout_s: float, nodes: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, not {world_size}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known are {', '.join(BACKENDS)}")
    if world_size % nodes:
        raise ValueError(f"world_size must be a multiple of the number of nodes, {nodes}, not {world_size}")
    if backend == "nccl" and (present := _gpus()) < world_size // nodes:
        raise ValueError(f"{world_size // nodes} nccl ranks need as many GPUs; there are {present}")
    for name, value in (("start_timeout_s", start_timeout_s), ("step_timeout_s", step_timeout_s)):
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, not {value}")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _name_of(function: Callable[..., Plain]) -> str:
    """Return "module:function". A module that runs by `python -m package.module` gets its importable name."""
    module = function.__module__
    if module == "__main__":
        specification = getattr(sys.modules["__main__"], "__spec__", None)
        if specification is None:
            raise ValueError(
                f"ranks cannot import {function.__qualname__}: put it into a module, or run with python -m"
            )
        module = specification.name.removesuffix(".__main__")
    if "." in function.__qualname__:
        raise ValueError(f"ranks cannot import {function.__qualname__}: it must be a function of a module")
    return f"{module}:{function.__qualname__}"


def _threads_per_rank(ranks: int, backend: str) -> int | None:
    """Return the threads of a CPU rank: its share of the cores, unless the environment says otherwise."""
    if backend != "gloo" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _to_json(value: object, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must be plain data, as JSON can hold it: {error}") from error


def _send(channel: Connection, kind: str, content: object) -> None:
    channel.send_bytes(json.dumps([kind, now_s(), content]).encode())


class Elastic(threading.Thread):
    """torch's elastic launcher, in a thread of its own, where it does not replace this process's signal handlers. It
    starts the ranks of one node."""

    def __init__(self, request: LaunchRequest, folder: Path, node: int = 0) -> None:
        super().__init__(name="elastic-launcher", daemon=True)
        self._request, self._folder, self._node = request, folder, node
        self.error: BaseException | None = None

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        request = self._request
        rendezvous: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        if request.rendezvous.nodes > 1:
            # Static, so that the ranks of node 0 are the first ones.
            rendezvous = {
                "rdzv_backend": "static",
                "rdzv_endpoint": f"{request.rendezvous.address[0]}:{request.rendezvous.port}",
                "rdzv_configs": {"rank": self._node, "timeout": math.ceil(request.start_timeout_s)},
            }
        config = LaunchConfig(
            min_nodes=request.rendezvous.nodes,
            max_nodes=request.rendezvous.nodes,
            nproc_per_node=request.rendezvous.ranks,
            run_id=request.rendezvous.run_id,
            max_restarts=0,
            monitor_interval=0.05,
            logs_specs=_logs(self._folder, request.to_json(), self._node * request.rendezvous.ranks),
            **rendezvous,
        )
        # Hides a warning that ranks outlive a process without its signal handlers (ours do not), and reports of exit
        # codes (RanksFailed has more information).
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)("-P", "-c", _RANK_PROGRAM)
        except ChildFailedError:
            # The ranks' connections show which one failed and why.
            pass
        except BaseException as error:  # noqa: BLE001 - the launching thread raises it
            self.error = error


# The launcher would open the logs for its children, and leave them open.
_RANK_PROGRAM = f"""
import os
log = os.open(os.environ["PARALLEL_RANK_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1), os.dup2(log, 2), os.close(log)
from {__name__} import rank_main
rank_main()
"""


def _logs(folder: Path, request: str, first_rank: int) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Logs(LogsSpecs):
        """Gives the launcher the log files, and adds the request to each rank's environment."""

        def __init__(self) -> None:
            super().__init__(str(folder))

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for index, environment in envs.items():
                environment[REQUEST] = request
                environment[LOG] = str(log_file(folder, first_rank + index))
                environment["PYTHONPATH"] = os.pathsep.join(json.loads(request)["path"])
            console = dict.fromkeys(envs, "")
            return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return Logs()


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


class _Ranks:
    """The launching process's view of the ranks: their connections, processes and deadlines."""

    def __init__(
        self,
        request: LaunchRequest,
        folder: Path,
        arguments: str,
        step_timeout_s: float,
        reported: Callable[[int, Any], None],
    ) -> None:
        self._request, self._folder, self._arguments = request, folder, arguments
        self._world_size = world_size = request.rendezvous.nodes * request.rendezvous.ranks
        self._start_timeout_s, self._step_timeout_s = request.start_timeout_s, step_timeout_s
        self._nodes: dict[int, RemoteNode] = {}
        """The other nodes, by their numbers."""
        self._reported = reported
        self.results: dict[int, str] = {}
        self._channels: dict[int, Connection] = {}
        self._processes: dict[int, int] = {}
        """Process descriptors (unlike process ids, never reused) by rank, or by negative process id if unconnected; of
        ranks on this host only, as `_pids`."""
        self._pids: dict[int, int] = {}
        self._open: dict[int, Connection] = {}
        """The connections that are not closed yet."""
        self._raised: set[int] = set()
        self._failures: list[tuple[tuple[float, int], RanksFailed]] = []
        """Failures by the time of their cause."""
        self._steps = dict.fromkeys(range(world_size), 0)
        self._start_deadline = now_s() + self._start_timeout_s
        self._deadlines = dict.fromkeys(range(world_size), self._start_deadline)

    def connect(self, listener: Listener, elastic: Elastic, met: Callable[[list[Any]], None]) -> None:
        """Wait for the connections of ranks and nodes, and send each rank its arguments."""
        socket = listener._listener._socket  # type: ignore[attr-defined]
        while len(self._channels) < self._world_size:
            if wait([socket], timeout=0.05):
                # A rank that died at once, which the launcher reports, or another process.
                with suppress(AuthenticationError, EOFError, OSError):
                    self._take(accepted(listener.accept()))
                continue
            for number, node in self._nodes.items():
                if (failure := node.failure()) is not None:
                    raise RanksFailed(None, f"could not be launched: node {number} {failure}")
            if not elastic.is_alive():
                self._never_started(elastic)
            if now_s() > self._start_deadline:
                missing = self._missing()
                raise RanksTimedOut(
                    missing, f"did not start within {self._start_timeout_s:g} s", **self._log_of(missing)
                )

        met([self._nodes[number].facts for number in sorted(self._nodes)])
        # Only now, since a rank that begins earlier could fail before the others are connected.
        for channel in self._channels.values():
            channel.send_bytes(self._arguments.encode())

    def _take(self, channel: Connection) -> None:
        hello = json.loads(channel.recv_bytes())
        if isinstance(hello, dict):
            node = self._nodes[hello["node"]] = RemoteNode(channel, hello["facts"])
            node.start(self._request.to_json())
            return
        index, pid = hello
        if index < self._request.rendezvous.ranks:
            self._processes[index] = os.pidfd_open(pid)
            self._pids[index] = pid
        self._channels[index] = self._open[index] = channel

    def _never_started(self, elastic: Elastic) -> None:
        if elastic.error is not None:
            raise RanksFailed(None, f"could not be launched: {elastic.error}") from elastic.error
        missing = self._missing()
        raise RanksFailed(missing, "ended before it began", **self._log_of(missing))

    def _missing(self) -> int:
        """Return a rank that is not connected, preferably one with a log that says why."""
        missing = [index for index in range(self._world_size) if index not in self._channels]
        return max(missing, key=lambda index: (bool(self._log_of(index)["log"]), -index))

    def listen(self) -> None:
        """Receive the ranks' messages until all have returned and closed their connections."""
        while self._open:
            now = now_s()
            deadlines = {index: self._deadline(index) for index in self._open}
            # If this process was slow, messages that ranks sent in time may not have been read yet.
            late = [index for index, deadline in deadlines.items() if deadline < now and not self._open[index].poll()]
            if late:
                self._raise_timeout(late)
            self._receive(max(0.0, min(deadlines.values()) - now))
            if self._failures:
                # The effects of one rank's failure on others may have arrived before its cause.
                until = now_s() + CAUSE_S
                while self._open and (remaining_s := until - now_s()) > 0:
                    self._receive(remaining_s)
                raise min(self._failures)[1]

    def _all_stepping(self) -> bool:
        return all(self._steps[index] or index in self.results for index in self._steps)

    def _deadline(self, index: int) -> float:
        """Return the latest time of a rank's next message. Ranks may have to wait until all others make steps."""
        return self._deadlines[index] if self._all_stepping() else self._start_deadline

    def _receive(self, timeout_s: float) -> None:
        """Receive a message from each rank that has sent one."""
        ranks = {channel: index for index, channel in self._open.items()}
        for channel in wait(list(ranks), timeout=timeout_s):
            index = ranks[channel]  # type: ignore[index]
            try:
                kind, at, content = json.loads(channel.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                del self._open[index]
                if index not in self.results and index not in self._raised:
                    # Only a rank's death closes its connection without a message: it is the cause of other errors.
                    log = self._log_of(index)
                    said = "".join(re.findall(r"^  what\(\):  (.+)$", log["log"], re.MULTILINE)[-1:])  # as gloo aborts
                    reason = f"died after step {self._steps[index]}{said and f': {said}'}"
                    self._failures.append(((0.0, index), RanksFailed(index, reason, **log)))
            else:
                # Clocks of other hosts begin at other times.
                self._handle(index, kind, at if index in self._pids else now_s(), content)

    def _handle(self, index: int, kind: str, at: float, content: Any) -> None:
        next_deadline = now_s() + self._step_timeout_s
        match kind:
            case "step":
                self._steps[index] += 1
                self._deadlines[index] = next_deadline
                if self._steps[index] == 1 and self._all_stepping():
                    # Ranks that were ready early have waited for the others, so their deadlines begin now.
                    self._deadlines = dict.fromkeys(self._deadlines, next_deadline)
            case "report":
                self._reported(index, content)
            case "returned":
                self.results[index] = content
                self._deadlines[index] = next_deadline
            case "raised":
                self._raised.add(index)
                error = RanksFailed(index, f"raised {content['error']}", trace=content["trace"], **self._log_of(index))
                self._failures.append(((at, index), error))

    def _raise_timeout(self, late: list[int]) -> None:
        """Raise RanksTimedOut for a stopped rank, or else for the only rank with the fewest steps."""
        stopped = [index for index in self._pids if _is_stopped(self._pids[index])]
        fewest = min(self._steps[index] for index in late)
        slowest = [index for index in late if self._steps[index] == fewest]
        slowest = [i for i in self._open if self._steps[i] <= fewest and i not in self.results] or slowest
        started = fewest > 0
        limit = self._step_timeout_s if started else self._start_timeout_s
        doing = f"no step within {limit:g} s after step {fewest}" if started else f"no first step within {limit:g} s"
        if stopped:
            raise RanksTimedOut(stopped[0], f"was stopped and made {doing}", **self._log_of(stopped[0]))
        self._log_stacks()
        blamed = slowest[0] if len(slowest) == 1 else None
        seen = slowest[0]
        raise RanksTimedOut(blamed, f"made {doing}", **self._log_of(seen))

    def _log_stacks(self) -> None:
        """Make every rank write its present stack to its log."""
        for process in self._processes.values():
            _signal(process, SIGNAL)
        time.sleep(STACK_DUMP_S)

    def _log_of(self, index: int) -> dict[str, Any]:
        path = log_file(self._folder, index)
        self._copy_log(index)
        try:
            content = path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            content = ""
        return {"log": content, "log_file": path}

    def _copy_log(self, index: int) -> None:
        """Copy the end of a rank's log from its node, if that is another one."""
        node = self._nodes.get(index // self._request.rendezvous.ranks)
        if node is not None:
            node.copy_log(index, log_file(self._folder, index))

    def end(self) -> None:
        """End all ranks, and remove shared memory that ranks have not removed themselves."""
        for index in range(self._world_size):
            self._copy_log(index)
        for node in self._nodes.values():
            node.close()
        shared: set[Path] = set()
        if len(self._pids) < self._request.rendezvous.ranks:
            self._find_unconnected()
        if len(self.results) < self._world_size:
            shared = {file for pid in self._pids.values() for file in shared_memory_of(pid)}
            self._kill()
        self._wait()
        self._kill()
        self._wait()
        for process in self._processes.values():
            os.close(process)
        for channel in self._channels.values():
            channel.close()
        for file in shared:
            file.unlink(missing_ok=True)

    def _find_unconnected(self) -> None:
        """Find ranks that have not connected: children of this process with this launch's request."""
        for pid in children_of(os.getpid()):
            if pid in self._pids.values():
                continue
            try:
                if self._request.rendezvous.run_id.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    self._processes[-pid] = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended

    def _kill(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGKILL)

    def _wait(self) -> None:
        """Wait for the ranks' processes to end, for a limited time."""
        until = now_s() + END_S
        for process in self._processes.values():
            wait([process], timeout=max(0.0, until - now_s()))


def _signal(process: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return  # it has ended


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def processes(proc: Path = Path("/proc")) -> Iterator[tuple[int, list[str]]]:
    """Yield the id of each process, with the fields of its `stat` behind its name, which may hold anything."""
    for path in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            yield int(path.parent.name), path.read_text(errors="replace").rpartition(")")[2].split()


def children_of(parent: int) -> list[int]:
    """Return the process ids of a process's children, including zombies."""
    return [pid for pid, fields in processes() if int(fields[1]) == parent]


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files in shared memory that NCCL, gloo or torch have made for a process and that still have a name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if f" {SHARED_MEMORY}/" in line}
    files = {Path(name) for name in names if not name.endswith(" (deleted)")}
    return {file for file in files if file.name.startswith(SHARED_MEMORY_NAMES)}


def rank_main() -> None:
    """Run as a rank: connect to the launching process, join the process group, call the function, send its result."""
    request = LaunchRequest.from_json(os.environ.pop(REQUEST))
    sys.path[:] = request.path  # without what a rank's own start has added: where the launching process does not look
    _die_with_parent(request.parent)
    # The elastic launcher sends SIGTERM to all ranks when one has ended. They are killed anyway, and if they ended now,
    # it would look as if they had died first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(SIGNAL)
    index, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    channel = _connect(request)
    channel.send_bytes(json.dumps([index, os.getpid()]).encode())
    try:
        arguments = json.loads(channel.recv_bytes())
        # The garbage collector would scan all imported objects repeatedly, and free nothing.
        gc.disable()
        device = _join(request)
        module, _, name = request.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        result = function(Rank(index, world_size, request.backend, device, channel), *arguments)
        text = _to_json(result, f"what {name} returns")
    except BaseException as error:
        _send(channel, "raised", {"error": _in_words(error), "trace": traceback.format_exc()})
        raise
    _send(channel, "returned", text)
    _leave()


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR]
    except BaseException as failure:  # noqa: BLE001 - the error is the caller's, and so is its text
        return f"{type(error).__name__}, whose str() raises {type(failure).__name__}"


def _connect(request: LaunchRequest) -> Connection:
    key = bytes.fromhex(request.rendezvous.key)
    if isinstance(request.rendezvous.address, str):
        return Client(f"\0{request.rendezvous.address}", family="AF_UNIX", authkey=key)
    host, port = request.rendezvous.address
    return Client((host, port), family="AF_INET", authkey=key)


def _join(request: LaunchRequest) -> torch.device:
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=request.start_timeout_s)
    if request.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        return device
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    # On one host, gloo needs neither its name nor its network. On several, the name may stand for this host only.
    interface = "lo" if isinstance(request.rendezvous.address, str) else interface_to(request.rendezvous.address[0])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def _leave() -> None:
    """Destroy the process group, unless the function has."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the launching process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
