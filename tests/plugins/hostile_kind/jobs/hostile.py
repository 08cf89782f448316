"""Runs `hostile`. Each unit writes down in $CHAOS_FOLDER/marks that it begins and ends, with a random number, its
nonce, and reports the nonce as a measurement and as a file: so everybody can tell whose results were stored."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from workers.jobs._base import Unit
from workers.reporter import Reporter

GARBAGE = (
    b"\xff\xfe\x00{]\n",
    b"null\n",
    b"[]\n",
    b'{"type":"artifact"}\n',
    b'{"type":"artifact","path":"/","name":"../x","kind":"x","media_type":"x"}\n',
    b'{"type":"measurement","case":"x"}\n',
    b'{"type":"cursor","position":-1}\n',
    b'{"type":"outcome","code":"nonsense","detail":7}\n',
    b'{"type":"validity","verdict":[],"checks":{},"case_key":{},"title":null}\n',
    b'{"type":' + b"[" * 100_000 + b"\n",
    b'{"type":"table","name":"\\ud800"}\n',
)


class HostileRunner:
    """The runner of kind `hostile`."""

    kind = "hostile"
    needs_torch = False

    def plan(self, spec: Any) -> list[Unit]:
        """As many units as the spec says."""
        return [Unit(f"unit {index}", start=spec.start, params={"index": index}) for index in range(spec.units)]

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Report results, misbehave, and tell the end if it comes to that."""
        index = unit.params["index"]
        mark, nonce = marker(report.scratch, index), random.getrandbits(50)
        mark("begin", nonce)
        report.progress(0, 1, f"{spec.behaviour} {spec.number}")
        measure(spec, report, "nonce", [float(nonce)])
        keep(report, "nonce.txt", f"{nonce}\n".encode())
        keep(report, "shared.txt", f"{spec.number % 5}\n".encode())
        print(f"unit {index} of job {spec.number} has nonce {nonce}", flush=True)
        time.sleep(spec.seconds)
        BEHAVIOURS[spec.behaviour](spec, report)
        mark("end", nonce)


def marker(scratch: Path, index: int) -> Callable[[str, int], None]:
    """A function that adds a line to the marks, whole, whoever else writes."""
    # The agent names a job's folder PID-JOB-ATTEMPT.
    agent, job, attempt = map(int, scratch.parent.name.split("-"))
    whose = {"agent": agent, "job": job, "attempt": attempt, "unit": index, "pid": os.getpid()}

    def mark(what: str, nonce: int) -> None:
        write_down(json.dumps({"mark": what, **whose, "nonce": nonce}))

    return mark


def write_down(line: str) -> None:
    descriptor = os.open(Path(os.environ["CHAOS_FOLDER"]) / "marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def measure(spec: Any, report: Reporter, metric: str, samples: list[float]) -> None:
    from workers.measure.measurement import Measurement

    case = spec.case()
    report.measure(Measurement(case.coordinates, case.key, "1x nothing", None, metric, "1", samples=samples))


def keep(report: Reporter, name: str, content: bytes) -> None:
    path = report.scratch / name
    path.write_bytes(content)
    report.artifact(path, name=name, kind="text", media_type="text/plain")


def good(spec: Any, report: Reporter) -> None:
    """Nothing is wrong."""


def many_measurements(spec: Any, report: Reporter) -> None:
    for number in range(spec.amount):
        measure(spec, report, f"metric_{number}", [1.0, 2.0, 3.0])


def many_artifacts(spec: Any, report: Reporter) -> None:
    for number in range(spec.amount):
        keep(report, f"{number}.txt", f"{number} of {spec.number}".encode())


def sparse_artifact(spec: Any, report: Reporter) -> None:
    """A file that takes no room and long to read."""
    path = report.scratch / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(spec.amount << 20)
    report.artifact(path, name=path.name, kind="binary", media_type="application/octet-stream")


def changing_artifact(spec: Any, report: Reporter) -> None:
    """A file that a process of the job goes on writing to, as long as it lives."""
    path = report.scratch / "changing.bin"
    file = path.open("wb", buffering=0)
    file.write(bytes(spec.amount << 20))
    if os.fork() == 0:
        while True:
            file.seek(0)
            file.write(random.randbytes(4096))
            time.sleep(0.001)
    report.artifact(path, name=path.name, kind="binary", media_type="application/octet-stream")


def stolen_artifact(spec: Any, report: Reporter) -> None:
    """A file of somebody else's, by a symbolic link."""
    path = report.scratch / "stolen.txt"
    path.symlink_to("/etc/hostname")
    report.artifact(path, name=path.name, kind="text", media_type="text/plain")
    time.sleep(3600)


def output(spec: Any, report: Reporter) -> None:
    for _ in range(spec.amount):
        sys.stdout.write(("x" * 99 + "\n") * 10_000)
    sys.stdout.flush()


def garbage(spec: Any, report: Reporter) -> None:
    """Bytes on the message pipe that are no message."""
    os.write(report.send.__self__.descriptor, GARBAGE[spec.number % len(GARBAGE)])  # type: ignore[attr-defined]
    time.sleep(3600)


def raises(spec: Any, report: Reporter) -> None:
    raise RuntimeError("\x1b]0;not a title\x07 \ud800 \0 <script>alert(1)</script>")


def exits(spec: Any, report: Reporter) -> None:
    if spec.number % 2:
        os._exit(0)
    sys.exit("no reason")


def segfault(spec: Any, report: Reporter) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hungry(spec: Any, report: Reporter) -> None:
    """Takes memory until it gets no more."""
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (spec.amount << 20),) * 2)
    hoard = []
    while True:
        hoard.append(b"x" * (1 << 20))


def daemon(spec: Any, report: Reporter) -> None:
    """Leaves a process behind, in a session of its own, whose parent is gone."""
    subprocess.run(["sh", "-c", "setsid sleep 3600 > /dev/null 2>&1 < /dev/null &"], check=True)


def ignores_sigterm(spec: Any, report: Reporter) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon(spec, report)
    time.sleep(3600)


def fork_bomb(spec: Any, report: Reporter) -> None:
    """Forks, and lets its forks fork: two to the power of `amount` processes that do not end."""
    me = os.getpid()
    for _ in range(spec.amount):
        os.fork()
    while os.getpid() != me:
        time.sleep(3600)


def closes_pipes(spec: Any, report: Reporter) -> None:
    """Goes on without the pipes to the agent, and so ends without a word."""
    os.closerange(0, 1 << 10)
    time.sleep(spec.seconds)
    os._exit(0)


def kills_keeper(spec: Any, report: Reporter) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def stops_keeper(spec: Any, report: Reporter) -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(3600)


def kills_agent(spec: Any, report: Reporter) -> None:
    agent = next(parent for parent in psutil.Process().parents() if {"agent", "--one-job"} & {*parent.cmdline()})
    write_down(json.dumps({"mark": "kills", "agent": agent.pid}))
    agent.kill()
    time.sleep(3600)


BEHAVIOURS: dict[str, Callable[[Any, Reporter], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        good,
        many_measurements,
        many_artifacts,
        sparse_artifact,
        changing_artifact,
        stolen_artifact,
        output,
        garbage,
        raises,
        exits,
        segfault,
        hungry,
        daemon,
        ignores_sigterm,
        fork_bomb,
        closes_pipes,
        kills_keeper,
        stops_keeper,
        kills_agent,
    )
}

RUNNER = HostileRunner()
