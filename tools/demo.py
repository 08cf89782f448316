"""`make demo`: start server and worker on a temporary folder, run a small sweep of the main job, print its table.

    python -m tools.demo [FIELD=VALUE[,VALUE]...]     fields of `flopwatch sweep benchmark` instead of the demo's own

Exits 0 only when every job succeeded. At the end, also after Ctrl-C, it stops its processes and removes its folder.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import httpx

from app.presets import DEMO_SWEEPS
from flopwatch.spelling import sweep_fields
from tools.service import Service

COLUMNS = "forward_ms,backward_ms,optimizer_ms,step_ms"
SETTINGS = {"FLOPWATCH_GRACE_S": "2"}  # a user who interrupts a demo does not want to wait
SHOWN_LOG_CHARACTERS = 8000
TABLE = """The milliseconds of one training step (step_ms) and of its three phases, by model size and context length.
A row with † or ‡ is uncertain; its note says why, and by how much."""

NEXT = """
This was a server and a worker of their own, which end now, and their data goes. To keep yours:

  {program} up                                                     # server and worker; pages at http://127.0.0.1:8000/ui
  {program} submit benchmark model.size=tiny --wait                # in another terminal
  {program} sweep benchmark --preset tiny context_length=64,128    # one job per combination of values
  {program} table --sweep 1 --format latex                         # or markdown, csv, json, html
  {program} specs                                                  # what else can be measured

docs/getting-started.md goes on from here, docs/python-client.md from Python."""


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


def main(fields: Sequence[str]) -> int:
    """Run the demo, over the given fields or its own; returns the exit code."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="flopwatch-demo-") as folder,
            Service(Path(folder), SETTINGS) as service,
        ):
            try:
                run(service, fields)
            except (DemoFailed, RuntimeError, TimeoutError, httpx.HTTPError):
                print(service.logs()[-SHOWN_LOG_CHARACTERS:], file=sys.stderr)
                raise
            finally:
                # From here on further signals wait, so that a second Ctrl-C leaves no process or folder behind.
                for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(signum, signal.SIG_IGN)
    except (DemoFailed, RuntimeError, TimeoutError, httpx.HTTPError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; nothing is left running.", file=sys.stderr)
        return 130
    return 0


def _end(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def run(service: Service, fields: Sequence[str]) -> None:
    """Start everything, submit the sweep, by default one that suits the host, follow it to its end, print its table.
    Raises DemoFailed: a command failed, or a job did."""
    print(f"Starting server and worker, with their data in {service.folder}.", flush=True)
    client = service.start_server()
    service.start_worker()
    (worker,) = client.get("/workers").raise_for_status().json()["data"]
    gpus = [device["name"] for device in worker["devices"] if device["type"] == "cuda"]
    place = gpus[0] if gpus else "the CPU, so models are small and steps few"
    print(f"The server is at {service.url}; the worker measures on {place}.", flush=True)
    environment = {**service.environment, "FLOPWATCH_URL": service.url}
    fields = fields or sweep_fields(**DEMO_SWEEPS["cuda" if gpus else "cpu"])
    code, answer = command(environment, "sweep", "benchmark", *fields, "--wait", "--json")
    if not answer:
        raise DemoFailed(f"flopwatch sweep ended with exit code {code}")
    sweep = str(json.loads(answer)["id"])
    table_code, table = command(environment, "table", "--sweep", sweep, "--columns", COLUMNS)
    print(f"\n{TABLE}\n\n{table}", flush=True)
    if code != 0:
        _, failed = command(environment, "jobs", "--sweep", sweep, "--state", "failed", "--json")
        reasons = [f"job {job['id']}: {job['error']['detail']}" for job in json.loads(failed)]
        raise DemoFailed("\n".join(["not every job succeeded", *reasons]))
    if table_code != 0:
        raise DemoFailed(f"flopwatch table ended with exit code {table_code}")
    print(NEXT.format(program=shlex.quote(program())), flush=True)


def program() -> str:
    """Return how a user starts flopwatch: by its path, where that is not on the path of the shell."""
    beside = Path(sys.executable).parent / "flopwatch"
    if shutil.which("flopwatch") or not beside.exists():
        return "flopwatch"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def command(environment: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Show and run one command of flopwatch; returns its exit code and standard output. Progress goes to standard
    error."""
    print(f"$ {shlex.join(['flopwatch', *arguments])}", flush=True)
    result = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return result.returncode, result.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
