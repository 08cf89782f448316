"""Records what a release writes, so that later ones can show that they read it.

    python -m tests.releases.record      writes tests/releases/<version>/; run it once, from the release's own commit

It runs real jobs on a CPU, and keeps their database, and the answers that the release itself gives.
"""

import gzip
import json
import sqlite3
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tools.service import Service, submit, wait_for_job

FOLDER = Path(__file__).parent
SMALL: dict[str, Any] = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 32, "batch_size": 1}
QUICK: dict[str, Any] = {"warmup_steps": 1, "measure_steps": 6, "device": "cpu"}
JOBS: tuple[dict[str, Any], ...] = (
    {"spec": {**SMALL, **QUICK}, "name": "main", "labels": {"team": "a"}},
    {"spec": {"kind": "profile", "model": {"size": "tiny"}, "context_length": 32, "batch_size": 1, **QUICK}},
    {"spec": {"kind": "memory", "model": {"size": "tiny"}, "context_length": 32, "batch_size": 1, "device": "cpu"}},
    {
        "spec": {
            "kind": "attention",
            "implementations": ["eager", "sdpa_math"],
            "sequence_lengths": [64],
            "device": "cpu",
        }
    },
    {"spec": {"kind": "estimate", "model": {"size": "small"}}},
    {
        "spec": {
            "kind": "compare",
            "baseline": {**SMALL, **QUICK},
            "candidate": {**SMALL, **QUICK, "context_length": 64},
            "replicates": 2,
        }
    },
)
ANSWERS = (
    "/jobs?limit=100",
    "/sweeps",
    "/baselines/main",
    "/tables?sweep=1",
    *(f"/jobs/{job}/{what}" for job in range(1, 7) for what in ("measurements", "units", "tables")),
    *(f"/tables?job={job}&format=csv" for job in (1, 3, 4, 5)),
    "/jobs/2/tables/operators-forward",
    "/compare?job=6&format=markdown",
    "/compare?baseline_name=main&candidate=1&format=csv",
)
"""What is asked of the release, and later of its successors."""


def answers(client: httpx.Client) -> dict[str, Any]:
    """Return the answer to each of ANSWERS, JSON or text."""
    found = {}
    for path in ANSWERS:
        response = client.get(path)
        is_json = response.headers["content-type"].startswith("application/json")
        response.raise_for_status()
        found[path] = response.json() if is_json else response.text
    return found


def record(folder: Path) -> None:
    """Run the jobs, and write database.sqlite3.gz and answers.json.gz."""
    folder.mkdir()
    with TemporaryDirectory(prefix="flopwatch-release-") as place, Service(Path(place)) as service:
        client = service.start_server()
        service.start_worker()
        for job in JOBS:
            wait_for_job(client, submit(client, job), timeout_s=300)
        client.put("/baselines/main", json={"job": 1}).raise_for_status()
        sweep = {"base": {**SMALL, **QUICK}, "grid": {"context_length": [16, 32]}}
        client.post("/sweeps", json=sweep).raise_for_status()
        for job in client.get("/jobs", params={"sweep": 1}).json()["data"]:
            wait_for_job(client, job["id"], timeout_s=300)
        service.stop_processes(*service.processes[1:])
        found = answers(client)
        service.stop()
        copy = Path(place) / "copy.sqlite3"
        with sqlite3.connect(service.data_dir / "flopwatch.sqlite3") as database:
            database.execute("VACUUM INTO ?", [str(copy)])
        for name, content in (("database.sqlite3", copy.read_bytes()), ("answers.json", json.dumps(found).encode())):
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    record(FOLDER / version("flopwatch"))
