"""A throw-away Slurm cluster of this test process's own, from Debian's packages: several nodes on one host.

Where Slurm is not installed, tests that need it are skipped. It starts within a second, and has no accounting, as small
sites have none.
"""

import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
PR_SET_PDEATHSIG = 1
NODES, CPUS, GPUS = 2, 32, 4
PORTS = range(12_000, 20_000)
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
MinJobAge=300
KillWait=2
SlurmdTimeout=10
MessageTimeout=10
GresTypes=gpu
"""


@dataclass
class Cluster:
    """A running cluster. Commands reach it with its `environment`."""

    folder: Path
    ports: list[int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, name: str, *command: str) -> None:
        """Start one of the cluster's daemons."""
        with (self.folder / "log" / name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def start_controller(self) -> None:
        self.start("slurmctld", "slurmctld", "-D")
        wait_until(lambda: "is UP" in self._try("scontrol", "ping"), what="slurmctld", poll_s=0.02)

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name)

    def kill(self, name: str) -> None:
        """Kill a daemon; the jobs of a node run on."""
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def nodes(self) -> list[str]:
        """Return the nodes' states, and resume those that are drained.

        A killed controller may have forgotten a start: it starts the job again, the node refuses what it runs already,
        and is drained as having a "Duplicate jobid" until somebody resumes it.
        """
        states = self._try("sinfo", "-h", "-N", "-p", "gpu", "-o", "%n %t").split()
        for name, state in zip(states[::2], states[1::2], strict=True):
            if state.startswith(("drain", "drng")):
                self._try("scontrol", "update", f"nodename={name}", "state=resume")
        return states[1::2]

    def wait_until_idle(self) -> None:
        """Wait until every node is free."""
        wait_until(lambda: self.nodes() == ["idle"] * NODES, what="idle nodes", timeout_s=60, poll_s=0.05)

    def allocations(self, *states: str) -> list[str]:
        """Return names of the allocations in these states; of all that have not ended if none are given."""
        asked = [f"--states={','.join(states)}"] if states else []
        return self.run("squeue", "-h", "-o", "%j", *asked).split()

    def _try(self, *command: str) -> str:
        try:
            return self.run(*command)
        except subprocess.SubprocessError:
            return ""

    def processes_of_jobs(self) -> list[int]:
        """Return the pids of what jobs have started, whether Slurm still knows of them or not."""
        found = []
        ours = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if ours in variables and any(one.startswith(b"SLURM_JOB_ID=") for one in variables):
                    found.append(int(process.name))
        return found

    def stop(self) -> None:
        for name in [name for name in self.processes if name != "munged"]:
            self.kill(name)
        deadline = time.monotonic() + 10
        while (left := self._steps()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.kill("munged")

    def _steps(self) -> list[int]:
        steps = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_step = (process / "comm").read_text().startswith("slurmstepd")
                if is_step and self.environment["SLURM_CONF"].encode() in (process / "environ").read_bytes():
                    steps.append(int(process.name))
        return steps + self.processes_of_jobs()


def _free_ports(number: int) -> list[int]:
    """Return free ports below those that the kernel gives to clients: a daemon that starts again needs its own."""
    ports: list[int] = []
    while len(ports) < number:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def _configure(cluster: Cluster) -> None:
    folder, user = cluster.folder, getpass.getuser()
    for name in ("etc", "state", "log", "munge", "dev", *(f"spool/n{number + 1}" for number in range(NODES))):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    controller, *nodes = cluster.ports
    lines = CONFIGURATION.format(host=socket.gethostname().partition(".")[0], port=controller, user=user, folder=folder)
    for number, port in enumerate(nodes, 1):
        what = f"CPUs={CPUS} RealMemory=4000 Gres=gpu:{GPUS}"
        lines += f"NodeName=n{number} NodeHostname=n{number} NodeAddr=127.0.0.1 Port={port} {what}\n"
    for name, tier, default in (("gpu", 1, "YES"), ("urgent", 10, "NO")):
        lines += f"PartitionName={name} Nodes=n[1-{NODES}] Default={default} PriorityTier={tier} MaxTime=1-0 State=UP\n"
    (folder / "etc" / "slurm.conf").write_text(lines)
    (folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    for number in range(GPUS):
        (folder / "dev" / f"nvidia{number}").symlink_to("/dev/null")  # any character device will do
    gres = f"NodeName=n[1-{NODES}] Name=gpu File={folder}/dev/nvidia[0-{GPUS - 1}]\n"
    (folder / "etc" / "gres.conf").write_text(gres)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster; skip the test where Slurm is not installed."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        pytest.skip(f"Slurm is not installed here: no {missing[0]} (Debian: slurmctld slurmd slurm-client munge)")
    with tempfile.TemporaryDirectory(prefix="flopwatch-slurm-") as root:
        cluster = Cluster(Path(root), _free_ports(1 + NODES))
        _configure(cluster)
        munge = cluster.folder / "munge"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        named = [f"--{option}={munge / name}" for option, name in files.items()]
        try:
            cluster.start("munged", "munged", "-F", "--force", "--num-threads=4", *named)
            wait_until((munge / "socket").exists, what="munged", poll_s=0.01)
            cluster.start_controller()
            for number in range(NODES):
                cluster.start_node(f"n{number + 1}")
            cluster.wait_until_idle()
            yield cluster
        finally:
            cluster.stop()
