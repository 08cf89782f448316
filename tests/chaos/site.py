"""A Flopwatch to be attacked: a server and workers that are started again when a fault has ended them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from app.specs._schema import SCHEMA
from tests.chaos.plan import LEASE_S, Fault
from tests.chaos.stores import Local, Remote, remote
from tests.disks import file_size_limit, full, small_disk
from tests.slurm_cluster import NODES, Cluster, running_cluster
from tools.service import Service
from tools.waiting import wait_until

PROJECT = Path(__file__).resolve().parents[2]
PLUGINS = PROJECT / "tests" / "plugins"
DISK_MIB = 512
GONE_S = 20.0
"""Seconds within which the processes of a stopped service must be gone."""
START_S = 150.0
HOUR_S = 3600.0
RESUME_S = 2.0
"""Seconds between two looks for drained nodes."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a service in `folder` whose workers know the kind `hostile`."""
    paths = [PLUGINS / "hostile_kind", PROJECT, PLUGINS, os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CHAOS_FOLDER": str(folder),
        "FLOPWATCH_LEASE_S": str(LEASE_S),
        "FLOPWATCH_GRACE_S": "1",
        "FLOPWATCH_BUSY_TIMEOUT_S": "2",
    }


@dataclass
class Member:
    """The server or a worker: a process that is started again when it has ended."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    expected_end: set[int] = field(default_factory=set)
    """Pids of processes that a fault has ended, or asked to end."""
    files_at_start: int = 0
    """Descriptors that it had open when it was ready."""
    peak_bytes: int = 0
    """The largest resident set that any of its processes had."""
    sizes: list[int] = field(default_factory=list)
    """Resident set of its process, every second."""
    next_size_at: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def expect_end(self) -> int:
        """Return its pid, and expect that process to end."""
        assert self.process is not None
        self.expected_end.add(self.process.pid)
        return self.process.pid

    def look(self) -> None:
        """Record its memory."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            size = psutil.Process(self.process.pid).memory_info().rss
            self.peak_bytes = max(self.peak_bytes, size)
            if (now := time.monotonic()) >= self.next_size_at:
                self.next_size_at = now + 1.0
                self.sizes.append(size)


class Site:
    """A service under a small disk of its own; use it as a context.

    stores: "local", "remote" (PostgreSQL and an object store), or "slurm": remote ones, and a worker of a cluster.
    stale: the number of further workers that read an older schema of specs.
    """

    def __init__(
        self, folder: Path, workers: int, stores: str = "local", stale: int = 0, service: type[Service] = Service
    ) -> None:
        self.folder = folder
        self.service = service(folder / "service", environment(folder))
        self.stores, self._kind, self._stale = Local(self.service.data_dir), stores, stale
        self.cluster: Cluster | None = None
        workers = (1 if stores == "slurm" else workers) + stale
        self.server = Member("server", self._start_server)
        self.workers = [Member(f"worker {index}", self._starter(index)) for index in range(workers)]
        self.unexpected: list[str] = []
        self._disk = contextlib.ExitStack()
        self.mounted = False
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._keep_up = threading.Event()
        self._keepers = [threading.Thread(target=self._keep, args=[member]) for member in self.members]
        self._not_before: dict[str, float] = {}
        self._resume_at = 0.0
        self.struck: Counter[str] = Counter()

    @property
    def members(self) -> list[Member]:
        """The server and the workers."""
        return [self.server, *self.workers]

    def __enter__(self) -> Site:
        with contextlib.suppress(pytest.skip.Exception):  # no disk of its own can be mounted
            self._disk.enter_context(small_disk(self.service.data_dir, f"size={DISK_MIB}m"))
            self.mounted = True
        try:
            if self._kind != "local":
                self.stores = self._disk.enter_context(remote(self.service.data_dir))
            if self._kind == "slurm":
                self.cluster = self._disk.enter_context(running_cluster())
                self.service.environment.update(self.cluster.environment)
            self.service.environment.update(self.stores.environment)
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        self._keep_up.set()
        self._ready(self.server, self.server.start())
        with ThreadPoolExecutor() as threads:
            for worker, process in zip(self.workers, threads.map(lambda one: one.start(), self.workers), strict=True):
                self._ready(worker, process)
        for keeper in self._keepers:
            keeper.start()

    def __exit__(self, *_exception: object) -> None:
        self.undo_all()
        self._stop_keeping()
        self.service.stop()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), timeout_s=GONE_S, what="the processes to be gone")
        self._disk.close()

    def _starter(self, index: int) -> Callable[[], subprocess.Popen[bytes]]:
        # Each on a host of its own, as far as they know: workers of one host take turns.
        host = self.folder / f"host-{index}"

        def start() -> subprocess.Popen[bytes]:
            host.mkdir(exist_ok=True)
            is_stale = index >= len(self.workers) - self._stale
            number = {"SCHEMA_NUMBER": str(SCHEMA - 1)} if is_stale else {}
            clock = str(self._clock(f"worker {index}"))
            environment = {"TMPDIR": str(host), "MOVED_CLOCK": clock, **number}
            if self.cluster is None:
                return self.service.start_worker(**environment)
            command = ["app.cli", "worker", "--executor", "slurm", "--slurm-settings", self._slurm_settings(host)]
            return self.service.start_worker(command=command, **environment)

        return start

    def _slurm_settings(self, host: Path) -> str:
        # Each node has device locks of its own, as if it were a host.
        setup = f"export TMPDIR={self.folder}/$SLURMD_NODENAME && mkdir -p $TMPDIR"
        values = {"folder": str(host / "handover"), "poll_s": 0.5, "command_timeout_s": 20, "setup": setup}
        file = host / "slurm.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
        return str(file)

    def leftovers(self) -> list[str]:
        """Return the entries in the folders of unfinished work."""
        data = self.service.data_dir
        folders = (data / "scratch", data / "artifacts" / "incoming", *self.folder.glob("host-*/handover"))
        return [str(path) for folder in folders for path in folder.glob("*") if path.name != "worker.lock"]

    def _start_server(self) -> subprocess.Popen[bytes]:
        self.service.start_server(MOVED_CLOCK=str(self._clock("server")))
        assert self.service.server is not None
        return self.service.server

    def _clock(self, name: str) -> Path:
        return self.folder / f"clock of {name}"

    def _ready(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        member.process, member.sizes = process, []
        with contextlib.suppress(psutil.NoSuchProcess):
            member.files_at_start = psutil.Process(process.pid).num_fds()

    def tick(self) -> None:
        """Undo the faults whose time is over, and check the members. Call it often, in the thread that causes the
        faults."""
        now = time.monotonic()
        due = [undo for at, undo in self._undo if at <= now]
        self._undo = [(at, undo) for at, undo in self._undo if at > now]
        for undo in due:
            undo()
        if self.cluster is not None and now >= self._resume_at:
            self._resume_at = now + RESUME_S
            self.cluster.nodes()
        for member in self.members:
            if member.alive:
                member.look()

    def _keep(self, member: Member) -> None:
        """Start the member again whenever it has ended."""
        while self._keep_up.is_set():
            if not member.alive and time.monotonic() >= self._not_before.get(member.name, 0.0):
                self._start_again(member)
            time.sleep(0.02)

    def _start_again(self, member: Member) -> None:
        assert member.process is not None
        self._judge_end(member, member.process)
        member.expected_end.add(member.process.pid)  # it is judged once
        try:
            self._ready(member, member.start())
        except (RuntimeError, TimeoutError) as error:  # on a full disk nothing starts; or it was killed meanwhile
            print(f"{member.name} did not start: {str(error).splitlines()[-1]}", flush=True)
            self._not_before[member.name] = time.monotonic() + 0.2

    def _judge_end(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        killed = f'"kills", "agent": {process.pid}}}'
        marks = self.folder / "marks"
        if process.pid not in member.expected_end and not (marks.exists() and killed in marks.read_text()):
            self.unexpected.append(f"{member.name} ended by itself, with {process.returncode}")

    def _stop_keeping(self) -> None:
        self._keep_up.clear()
        for keeper in self._keepers:
            if keeper.is_alive():
                keeper.join()

    # Faults

    def strike(self, fault: Fault) -> None:
        """Cause the fault. Its target may not exist at the moment, or end meanwhile."""
        self.struck[fault.kind] += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        what, _, at = fault.kind.partition("_")
        match fault.kind:
            case "disk_full":
                self._later(fault, fill(self.service.data_dir, self.members, mounted=self.mounted))
            case "held_lock":
                self._later(fault, hold(self.service.data_dir / "flopwatch.sqlite3.lock"))
            case "database_away" | "store_away":
                assert isinstance(self.stores, Remote)
                network = self.stores.networks[fault.kind]
                network.cut()
                self._undo.append((time.monotonic() + fault.lasts_s, network.mend))
            case "kill_database":
                assert isinstance(self.stores, Remote)
                self.stores.kill(fault.target)
            case "kill_controller" | "kill_node" | "kill_agent" | "cancel_allocation":
                assert self.cluster is not None
                self._strike_cluster(fault, self.cluster)
            case "clock":
                member = self.members[fault.target % len(self.members)]
                self._clock(member.name).write_text(str(fault.amount * HOUR_S))
            case "kill_server" | "stop_server":
                self._signal_member(fault, self.server, what)
            case "kill_worker" | "stop_worker" | "end_worker" | "kill_worker_and_all_below":
                worker = self.workers[fault.target % len(self.workers)]
                self._signal_member(fault, worker, what, below=at.endswith("below"))
            case _:
                self._signal_below(fault, what, at)

    def _strike_cluster(self, fault: Fault, cluster: Cluster) -> None:
        if fault.kind == "kill_agent":
            agents = self._agents()
            if agents:
                send(agents[fault.target % len(agents)].pid, signal.SIGKILL)
        elif fault.kind == "cancel_allocation":
            with contextlib.suppress(subprocess.SubprocessError):  # while the controller is away
                if found := cluster.run("squeue", "-h", "-o", "%i").split():
                    cluster.run("scancel", found[fault.target % len(found)])
        else:
            name = "slurmctld" if fault.kind == "kill_controller" else f"n{fault.target % NODES + 1}"
            if name in cluster.processes:
                cluster.kill(name)
                again = cluster.start_controller if name == "slurmctld" else lambda: cluster.start_node(name)
                self._undo.append((time.monotonic() + fault.lasts_s, again))

    def _agents(self) -> list[psutil.Process]:
        """Return what runs jobs: the workers, or the agents in a cluster's allocations."""
        if self.cluster is None:
            return [psutil.Process(one.process.pid) for one in self.workers if one.alive and one.process is not None]
        found = []
        for pid in self.cluster.processes_of_jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "--one-job" in process.cmdline():
                    found.append(process)
        return found

    def _signal_member(self, fault: Fault, member: Member, what: str, *, below: bool = False) -> None:
        if not member.alive:
            return
        assert member.process is not None
        if what == "stop":
            self._stop(fault, member.process.pid)
            return
        # A job's daemon, which is a `sleep`, stays.
        everybody = psutil.Process(member.process.pid).children(recursive=True) if below else []
        below_it = [process.pid for process in everybody if process.name() != "sleep"]
        # While it is being judged, the keeper must not take it for one that has ended by itself.
        pid = member.expect_end()
        self._not_before[member.name] = time.monotonic() + fault.lasts_s
        send(pid, signal.SIGTERM if what == "end" else signal.SIGKILL)
        if what == "end":
            send(pid, signal.SIGCONT)
        for pid in below_it:
            send(pid, signal.SIGKILL)

    def _signal_below(self, fault: Fault, what: str, whom: str) -> None:
        found = sorted(self._below()[whom])
        if not found:
            return
        pid = found[fault.target % len(found)]
        if what == "kill":
            send(pid, signal.SIGKILL)
        else:
            self._stop(fault, pid)

    def _stop(self, fault: Fault, pid: int) -> None:
        send(pid, signal.SIGSTOP)
        self._undo.append((time.monotonic() + fault.lasts_s, lambda: send(pid, signal.SIGCONT)))

    def _later(self, fault: Fault, condition: contextlib.AbstractContextManager[None]) -> None:
        """Let a condition hold for as long as the fault lasts."""
        stack = contextlib.ExitStack()
        stack.enter_context(condition)
        self._undo.append((time.monotonic() + fault.lasts_s, stack.close))

    def _below(self) -> dict[str, list[int]]:
        """Return the pids of the workers' processes by their role."""
        found: dict[str, list[int]] = {"warm_parent": [], "keeper": [], "job": []}
        for agent in self._agents():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in agent.children():
                    # A keeper that was forked from the warm parent looks like it.
                    warm = "warm" in child.cmdline()
                    found["warm_parent" if warm else "keeper"].append(child.pid)
                    for grandchild in child.children():
                        found["keeper" if warm else "job"].append(grandchild.pid)
                        found["job"] += [below.pid for below in grandchild.children()] if warm else []
        return found

    # The end

    def undo_all(self) -> None:
        """End all faults that last."""
        undo, self._undo = self._undo, []
        for _, work in undo:
            work()

    def wait_until_up(self) -> None:
        """Wait until server and workers run."""
        self._not_before.clear()
        wait_until(lambda: all(one.alive for one in self.members), timeout_s=START_S, what="server and workers to run")

    def stop_workers(self) -> list[str]:
        """Ask the workers to end; returns the faults of how they do so."""
        self._stop_keeping()
        processes = [worker.process for worker in self.workers if worker.process is not None]
        self.service.stop_processes(*processes)
        found = [
            f"{worker.name} ended with {worker.process.returncode} when it was asked to end"
            for worker in self.workers
            if worker.process is not None and worker.process.returncode != 0
        ]
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._others(), timeout_s=GONE_S, what="the jobs' processes to be gone")
        return found + [f"a process was left: {describe(pid)}" for pid in self._others()]

    def files_left_open(self, slack: int) -> list[str]:
        """Descriptors that the members have not closed although nothing happens any more, beyond `slack`."""
        found = []
        for member in self.members:
            assert member.process is not None
            process, most = psutil.Process(member.process.pid), member.files_at_start + slack
            with contextlib.suppress(TimeoutError):
                wait_until(lambda p=process, m=most: p.num_fds() <= m, timeout_s=GONE_S, what="closed files")  # type: ignore[misc]
            if process.num_fds() > most:
                names = sorted(str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir())
                found.append(f"{member.name} had {member.files_at_start} files open at its start, now {names}")
        return found

    def processes(self) -> list[int]:
        """Return the pids of all processes that were started for this site, directly or not."""
        mine, found = f"CHAOS_FOLDER={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if (
                    mine in path.read_bytes().split(b"\0")
                    and b"\nState:\tZ" not in (path.parent / "status").read_bytes()
                ):
                    found.append(int(path.parent.name))
        return found

    def _others(self) -> list[int]:
        """Return all pids except the server's."""
        server = self.service.server
        return [pid for pid in self.processes() if server is None or pid != server.pid]


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def describe(pid: int) -> str:
    """A process, for people."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}, {' '.join(process.cmdline())}), child of {process.ppid()}"
    return f"{pid}, which is gone by now"


@contextlib.contextmanager
def fill(folder: Path, members: list[Member], *, mounted: bool) -> Iterator[None]:
    """Fill the disk of `folder`, so that no process can write; if it is not a separate disk, limit file sizes to the
    largest present file."""
    if not mounted:
        largest = max(path.stat().st_size for path in folder.glob("flopwatch.sqlite3*"))
        pids = [member.process.pid for member in members if member.alive and member.process is not None]
        with contextlib.ExitStack() as stack:
            for pid in pids:
                stack.enter_context(file_size_limit(pid, largest))
            yield
        return
    with full(folder):
        yield


@contextlib.contextmanager
def hold(lock: Path) -> Iterator[None]:
    """Hold a file lock, once it is free."""
    descriptor = os.open(lock, os.O_RDWR)
    deadline = time.monotonic() + 1.0
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
        yield
    finally:
        os.close(descriptor)


def logs_of(folder: Path, name: str) -> Mapping[str, str]:
    """Output of all processes of this name."""
    return {path.name: path.read_text(errors="replace") for path in sorted(folder.glob(f"*-{name}.log"))}
