"""What models and jobs of tests do, without torch. Files in a folder tell the test what happened and hold jobs back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


def append(path: Path, line: str) -> None:
    """Add a line to a file, whole, whoever else writes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def count(folder: Path, number: int) -> None:
    """Write down that it ran, and which job it is."""
    append(folder / "runs", str(number))


def mark_overlaps(folder: Path) -> None:
    """Write down when another one runs at the same time."""
    mark = folder / "busy"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        append(folder / "overlaps", str(os.getpid()))
        return
    time.sleep(0.1)
    mark.unlink()


def wait_at_gate(folder: Path) -> None:
    """Wait until the file `open`, or `open-PID`, is there; the pid tells that it has started."""
    append(folder / "started", str(os.getpid()))
    gates = [folder / "open", folder / f"open-{os.getpid()}"]
    while not any(gate.exists() for gate in gates):
        time.sleep(0.01)


def never_end(folder: Path) -> None:
    """Ignore SIGTERM, as does a daemon that it starts: in a session of its own, orphaned. Neither ends by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_daemon = ["sh", "-c", "setsid sleep 3600 > /dev/null & echo $!"]
    daemon = subprocess.run(start_daemon, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    append(folder / "started", f"{os.getpid()} {daemon}")
    while True:
        time.sleep(0.1)


def chatter() -> None:
    """Print 100 MB, between a first and a last line that must be kept."""
    print("first line", flush=True)
    block = ("x" * 99 + "\n") * 10_000
    for _ in range(100):
        sys.stdout.write(block)
    print("last line", flush=True)


def write_down_variables(folder: Path) -> None:
    """Write down every variable that it can find: its own, and those that it and its parents were started with."""
    found = {f"{name}={value}" for name, value in os.environ.items()}
    process = psutil.Process()
    for one in (process, *process.parents()):
        words = one.cmdline()
        if "pytest" in {Path(word).name for word in words} or not any("workers" in word for word in words):
            break  # whoever started the worker: pytest's own variables are those of a shell
        found |= {f"{name}={value}" for name, value in one.environ().items()}
    append(folder / "variables", json.dumps(sorted(found)))


def fall_over() -> None:
    """End by a segmentation fault."""
    print("about to fall over", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
