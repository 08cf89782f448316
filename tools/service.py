"""A whole Flopwatch for benchmarks and acceptance tests: the real server and real workers over one temporary folder."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from app.settings import Settings
from tools.waiting import wait_until

FINAL_STATES = {"succeeded", "failed", "cancelled"}
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Service:
    """Starts and stops the processes; `client` talks to the server."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLOPWATCH_")},
            "FLOPWATCH_DATA_DIR": str(self.data_dir),
            "FLOPWATCH_PORT": "0",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""
        self._clients = ExitStack()
        self._numbers = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def settings(self) -> Settings:
        """Return settings for reading and writing the database beside the server."""
        return Settings(data_dir=self.data_dir, database_url=self.environment.get("FLOPWATCH_DATABASE_URL"))

    def start_process(
        self, name: str, arguments: list[str], **environment: str
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `python -m ARGUMENTS`; its output goes to a file, whose path is returned too."""
        log = self.folder / f"{next(self._numbers):02d}-{name}.log"
        log.touch()
        process = self.launch(arguments, {**self.environment, **environment}, log)
        self.processes.append(process)
        return process, log

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start `python -m ARGUMENTS` in an environment, with its output in the file `log`."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_server(self, **environment: str) -> httpx.Client:
        """Start the server and wait until it answers; returns a client. A restarted server keeps its port."""
        if self.url:
            environment.setdefault("FLOPWATCH_PORT", self.url.rpartition(":")[2])
        self.server, log = self.start_process("server", ["app.cli", "serve"], **environment)
        self.url = self._wait_for_line(self.server, log, rb"listening on (http://\S+)")
        return self.client()

    def client(self, timeout_s: float = 90.0) -> httpx.Client:
        # Without TLS: to read its certificates takes longer than most requests.
        return self._clients.enter_context(httpx.Client(base_url=self.url, timeout=timeout_s, verify=False))

    def start_worker(
        self, *, command: Sequence[str] = ("workers", "agent"), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker and wait until it has registered and its warm parent is up."""
        return self.start_workers(environment, command=command)[0]

    def start_workers(
        self, *environments: Mapping[str, str], command: Sequence[str] = ("workers", "agent")
    ) -> list[subprocess.Popen[bytes]]:
        """Start a worker in each environment, all at the same time."""
        started = [self.start_process("worker", [*command], **environment) for environment in environments]
        for process, log in started:
            self._wait_for_line(process, log, rb"worker (\S+) ready")
        return [process for process, _log in started]

    def stop(self) -> None:
        """Ask every process to end, and kill those that do not."""
        self._clients.close()
        self.stop_processes(*self.processes)

    def stop_processes(self, *processes: subprocess.Popen[bytes]) -> None:
        """Ask these processes to end, and kill those that do not."""
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        parts = [f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)

    def _wait_for_line(self, process: subprocess.Popen[bytes], log: Path, pattern: bytes) -> str:
        def find() -> str | None:
            if match := re.search(pattern, log.read_bytes()):
                return match[1].decode()
            if process.poll() is not None:
                raise RuntimeError(f"{log.name} ended with {process.returncode}:\n{log.read_text(errors='replace')}")
            return None

        try:
            return wait_until(find, timeout_s=START_TIMEOUT_S, what=f"{pattern!r} in {log.name}")
        except TimeoutError:
            # If it lived on, it would start later, and take the port of the process that is started in its place.
            process.kill()
            process.wait()
            raise


def submit(client: httpx.Client, job: dict[str, Any]) -> int:
    return int(client.post("/jobs", json=job).raise_for_status().json()["id"])


def wait_for_job(client: httpx.Client, job_id: int, *, timeout_s: float = 60.0) -> dict[str, Any]:

    def final() -> dict[str, Any] | None:
        job: dict[str, Any] = client.get(f"/jobs/{job_id}").raise_for_status().json()
        return job if job["state"] in FINAL_STATES else None

    return wait_until(final, timeout_s=timeout_s, what=f"job {job_id} to end")
