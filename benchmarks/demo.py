"""`make demo`: start server and worker on a temporary folder, run a small sweep of the main job, print its table, stop.

Exits 0 only when every job succeeded. Whatever happens, Ctrl-C included, nothing is left running and nothing on disk.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import httpx
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
GRACE_S = "2"
DEMO_TIMEOUT_S = 1800.0
POLL_S = 0.2

CPU_SWEEP: dict[str, Any] = {
    "name": "demo",
    "base": {"kind": "benchmark", "mode": "train_step", "batch_size": 1, "warmup_steps": 1, "measure_steps": 3},
    "grid": {"model.size": ["tiny", "small"], "context_length": [128, 256]},
}
GPU_SWEEP: dict[str, Any] = {
    "name": "demo",
    "base": {"kind": "benchmark", "mode": "train_step"},
    "grid": {"model.size": ["tiny", "small", "medium", "large"], "context_length": [256, 512]},
}
COLUMNS = "forward_ms,backward_ms,optimizer_ms,step_ms"

Found = TypeVar("Found")
console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


def main() -> int:
    """Run the demo; returns the exit code."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="flopwatch-demo-") as folder, service(Path(folder)) as client:
            return run(client)
    except (DemoFailed, httpx.HTTPError) as error:
        console.print(f"The demo failed: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.")
        return 130


def _end(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)


@contextlib.contextmanager
def service(folder: Path) -> Iterator[httpx.Client]:
    """Server and worker as `flopwatch up` starts them; on leaving they are stopped, by force if need be."""
    port = free_port()
    log = folder / "service.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLOPWATCH_")}
    environment |= {
        "FLOPWATCH_DATA_DIR": str(folder / "data"),
        "FLOPWATCH_PORT": str(port),
        "FLOPWATCH_GRACE_S": GRACE_S,  # who interrupts a demo does not want to wait
    }
    command = [str(Path(sys.executable).with_name("flopwatch")), "up"]
    console.print(f"Starting server and worker on port {port}, with their data in {folder}")
    with log.open("wb") as output:
        # In a session of its own: a terminal's Ctrl-C reaches us alone, and we stop the others in order.
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False) as client:
            client.event_hooks["request"] = [lambda _request: _check_alive(process)]
            wait_for("the server", lambda: _answers(client), START_TIMEOUT_S)
            yield client
    except (DemoFailed, httpx.HTTPError):
        console.print(log.read_text(errors="replace")[-8000:], style="dim", markup=False)
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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _check_alive(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise DemoFailed(f"flopwatch up ended with exit code {process.returncode}")


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def wait_for(what: str, look: Callable[[], Found], timeout_s: float) -> Found:
    """The first true answer of `look`.

    Raises:
        DemoFailed: there was none within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() >= deadline:
            raise DemoFailed(f"{what} is not there after {timeout_s:g} s")
        time.sleep(POLL_S)
    return found


def run(client: httpx.Client) -> int:
    """Submit the sweep that suits the host, follow it to its end, print its table; returns the exit code."""
    (worker,) = wait_for("the worker", lambda: get(client, "/workers")["data"], START_TIMEOUT_S)
    gpus = [device for device in worker["devices"] if device["type"] == "cuda"]
    console.print(f"The worker measures on {gpus[0]['name'] if gpus else 'the CPU: small models, few steps'}")
    body = GPU_SWEEP if gpus else CPU_SWEEP
    console.print(f"$ {as_command(body)}", style="bold", markup=False)
    answer = client.post("/sweeps", json=body)
    if answer.status_code != httpx.codes.CREATED:
        raise DemoFailed(f"the sweep was refused: {answer.text}")
    sweep_id = answer.json()["id"]
    jobs = follow(client, sweep_id)
    console.print(f"$ flopwatch table --sweep {sweep_id} --format markdown", style="bold", markup=False)
    table = client.get("/tables", params={"sweep": sweep_id, "columns": COLUMNS, "format": "markdown"})
    console.print(table.raise_for_status().text, markup=False)
    failed = [job for job in jobs if job["state"] != "succeeded"]
    for job in failed:
        detail = job["error"]["detail"] if job["error"] else ""
        console.print(f"job {job['id']} ({title(job)}) {job['state']}: {detail}", style="red", markup=False)
    return 1 if failed else 0


def follow(client: httpx.Client, sweep_id: int) -> list[dict[str, Any]]:
    """Show the sweep's progress until every job is done: bars on a terminal, else a line for each change of state."""
    deadline = time.monotonic() + DEMO_TIMEOUT_S
    states: dict[int, str] = {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {}
        while time.monotonic() < deadline:
            jobs = sorted(get(client, f"/jobs?sweep={sweep_id}&limit=100")["data"], key=lambda job: job["id"])
            for job in jobs:
                if job["id"] not in bars:
                    bars[job["id"]] = progress.add_task(title(job), total=None, start=False)
                if states.get(job["id"]) != job["state"]:
                    states[job["id"]] = job["state"]
                    if not console.is_terminal:
                        console.print(f"{title(job)}: {job['state']}")
                    if job["state"] == "running":
                        progress.start_task(bars[job["id"]])
                show(progress, bars[job["id"]], job)
            if all(job["finished_at"] for job in jobs):
                return jobs
            time.sleep(POLL_S)
    raise DemoFailed(f"the sweep was not done after {DEMO_TIMEOUT_S:g} s")


def show(progress: Progress, bar: Any, job: dict[str, Any]) -> None:
    """Bring one job's bar up to date."""
    done, total = job["progress"]["done"], job["progress"]["total"]
    if job["finished_at"]:
        progress.update(bar, completed=total or 1, total=total or 1)
        progress.stop_task(bar)
    elif total:
        progress.update(bar, completed=done, total=total)


def title(job: dict[str, Any]) -> str:
    """A job of the sweep, in words."""
    return f"{job['spec']['model']['size']}, context length {job['spec']['context_length']}"


def as_command(body: dict[str, Any]) -> str:
    """The command that submits the same sweep."""
    fixed = [f"{name}={value}" for name, value in body["base"].items() if name != "kind"]
    varied = [f"{name}={','.join(map(str, values))}" for name, values in body["grid"].items()]
    return shlex.join(["flopwatch", "sweep", body["base"]["kind"], *varied, *fixed])


def get(client: httpx.Client, path: str) -> Any:
    """A JSON answer.

    Raises:
        httpx.HTTPStatusError: it was an error.
    """
    return client.get(path).raise_for_status().json()


if __name__ == "__main__":
    sys.exit(main())
