"""`make demo`: start server and worker on a temporary folder, run a small sweep of the main job, print its table, stop.

Everything is done by the commands that it shows. Exits 0 only when every job succeeded. Whatever happens, Ctrl-C
included, nothing is left running and nothing on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

import httpx
import psutil

FLOPWATCH = str(Path(sys.executable).with_name("flopwatch"))
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
SHOWN_LOG_CHARACTERS = 8000

ON_A_CPU = "model.size=tiny,small context_length=128,256 batch_size=1 warmup_steps=1 measure_steps=3"
ON_A_GPU = "model.size=tiny,small,medium,large context_length=256,512"
COLUMNS = "forward_ms,backward_ms,optimizer_ms,step_ms"

Found = TypeVar("Found")


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


def main() -> int:
    """Run the demo; returns the exit code."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="flopwatch-demo-") as folder:
            environment = settings(Path(folder))
            with service(Path(folder) / "service.log", environment) as client:
                run_sweep(client, environment)
    except (DemoFailed, httpx.HTTPError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; nothing is left running.", file=sys.stderr)
        return 130
    return 0


def _end(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def settings(folder: Path) -> dict[str, str]:
    """The environment of every process of the demo: settings of its own, none of the user's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLOPWATCH_")}
    return environment | {
        "FLOPWATCH_DATA_DIR": str(folder / "data"),
        "FLOPWATCH_PORT": str(free_port()),
        "FLOPWATCH_GRACE_S": "2",  # who interrupts a demo does not want to wait
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def service(log: Path, environment: Mapping[str, str]) -> Iterator[httpx.Client]:
    """Server and worker, and a client of theirs; on leaving they are stopped, by force if need be."""
    url = f"http://127.0.0.1:{environment['FLOPWATCH_PORT']}"
    print(f"$ flopwatch up    # on {url}, data in {environment['FLOPWATCH_DATA_DIR']}", flush=True)
    with log.open("wb") as output:
        # In a session of its own: a terminal's Ctrl-C reaches us alone, and we stop the others in order.
        process = subprocess.Popen(
            [FLOPWATCH, "up"], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as client:
            wait_for("the server", lambda: _answers(client), process)
            wait_for("the worker", lambda: client.get("/workers").raise_for_status().json()["data"], process)
            yield client
    except (DemoFailed, httpx.HTTPError):
        print(log.read_text(errors="replace")[-SHOWN_LOG_CHARACTERS:], file=sys.stderr)
        raise
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the service; from here on signals to us wait, so that impatience leaves nothing behind."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid)
        for member in (*family.children(recursive=True), family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def wait_for(what: str, look: Callable[[], Found], process: subprocess.Popen[bytes]) -> Found:
    """The first true answer of `look`.

    Raises:
        DemoFailed: there was none in time, or the service has ended.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (found := look()):
        if process.poll() is not None:
            raise DemoFailed(f"flopwatch up ended with exit code {process.returncode}")
        if time.monotonic() >= deadline:
            raise DemoFailed(f"{what} is not there after {START_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return found


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def run_sweep(client: httpx.Client, environment: Mapping[str, str]) -> None:
    """Submit the sweep that suits the host, follow it to its end, print its table.

    Raises:
        DemoFailed: a command failed, or a job did.
    """
    (worker,) = client.get("/workers").raise_for_status().json()["data"]
    gpus = [device["name"] for device in worker["devices"] if device["type"] == "cuda"]
    print(f"Measuring on {gpus[0] if gpus else 'the CPU, so models are small and steps few'}.", flush=True)
    fields = (ON_A_GPU if gpus else ON_A_CPU).split()
    code, answer = command(environment, "sweep", "benchmark", *fields, "--wait", "--json")
    if not answer:
        raise DemoFailed(f"flopwatch sweep ended with exit code {code}")
    sweep = str(json.loads(answer)["id"])
    shown, table = command(environment, "table", "--sweep", sweep, "--columns", COLUMNS)
    print(table)
    if code != 0:
        _, failed = command(environment, "jobs", "--sweep", sweep, "--state", "failed", "--json")
        reasons = [f"job {job['id']}: {job['error']['detail']}" for job in json.loads(failed)]
        raise DemoFailed("\n".join(["not every job succeeded", *reasons]))
    if shown != 0:
        raise DemoFailed(f"flopwatch table ended with exit code {shown}")


def command(environment: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Show and run one command of flopwatch; its exit code and standard output. Progress goes to standard error."""
    print(f"$ {shlex.join(['flopwatch', *arguments])}", flush=True)
    result = subprocess.run([FLOPWATCH, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return result.returncode, result.stdout


if __name__ == "__main__":
    sys.exit(main())
