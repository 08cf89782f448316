"""Where users' code runs: in a fresh copy of the folder that went along, at the place of its file, or in an empty
folder; and that nothing of it stays, whoever is killed."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from flopwatch import Flopwatch
from tests.acceptance.sabotage import other_host, plain_job, wait_for_start, wait_for_state, wait_until_gone
from tools.service import Service, submit
from tools.waiting import wait_until

pytestmark = pytest.mark.acceptance

LITTERING = """
import json
import os
import subprocess
import sys

import torch


class Places(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return os.getcwd()


def tell():
    here = os.getcwd()
    loader = torch.utils.data.DataLoader(Places(), num_workers=1, batch_size=None)
    asked = [sys.executable, "-c", "import os; print(os.getcwd())"]
    found = {
        "here": here,
        "files": sorted(name for name in os.listdir() if name != "__pycache__"),
        "beside": open("config.txt").read() if os.path.exists("config.txt") else None,
        "loader": next(iter(loader)),
        "subprocess": subprocess.check_output(asked, text=True).strip(),
        "arguments": sys.argv[1:],
    }
    print("found", json.dumps(found), flush=True)
    torch.save({}, "checkpoint.pt")
    os.makedirs("out/deep", exist_ok=True)
    if os.path.exists("config.txt"):
        open("config.txt", "w").write("changed")


def make_step(device):
    tell()
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    return lambda: (weight @ weight).sum().backward()
"""
STEP = {"device": "cpu", "warmup_steps": 1, "measure_steps": 2}
KINDS = {"benchmark": {**STEP, "replicates": 2}, "ddp": {**STEP, "world_size": 2}}


def run(flopwatch: Flopwatch, kind: str, file: Path, code: Path | None) -> list[dict[str, Any]]:
    """Run a job of this kind with the file; what its processes have told."""
    spec = flopwatch.with_code({"kind": kind, **KINDS[kind]}, code=code, step=f"{file}:make_step")
    done = flopwatch.wait(flopwatch.submit(spec), timeout_s=120, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    lines = flopwatch.send("GET", f"/jobs/{done['id']}/logs").text.splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("found ")]


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_start_in_a_fresh_copy_of_their_folder(flopwatch, site, started_service, kind, tmp_path) -> None:
    place = tmp_path / "project" / "training"
    place.mkdir(parents=True)
    (place / "train.py").write_text(LITTERING)
    (place / "config.txt").write_text("as sent")
    scratch = started_service[0].data_dir / "scratch"
    of_the_worker = Path(psutil.Process(site.worker.pid).cwd())
    before = set(of_the_worker.iterdir())
    told = [
        found
        for code in (tmp_path / "project", tmp_path / "project", None)
        for found in run(flopwatch, kind, place / "train.py", code)
    ]
    processes = 2
    assert len(told) == 3 * processes
    for found in told:
        here = Path(found["here"])
        assert found["loader"] == found["subprocess"] == str(here)
        assert here.is_relative_to(scratch.resolve())
        assert found["arguments"] == []
    ranks_share = kind == "ddp"  # as under torchrun
    for found in told[:-processes]:
        assert Path(found["here"]).name == "training"
        if not ranks_share:
            assert (found["files"], found["beside"]) == (["config.txt", "train.py"], "as sent")
    for found in told[-processes:]:
        assert found["beside"] is None
        assert ranks_share or found["files"] == []
    assert len({found["here"] for found in told}) == (3 if ranks_share else 3 * processes)
    wait_until(lambda: [len(list(folder.iterdir())) for folder in scratch.iterdir()] == [0], "the folders to be gone")
    assert set(of_the_worker.iterdir()) == before
    assert {file.name: file.read_text() for file in place.iterdir()} == {"train.py": LITTERING, "config.txt": "as sent"}


def test_nothing_stays_when_keeper_or_agent_is_killed(own_service: Service, misbehave_folder: Path) -> None:
    own_service.start_server()
    client, scratch = own_service.client(), own_service.data_dir / "scratch"
    worker = own_service.start_worker()

    def start(number: int) -> tuple[int, int]:
        """Start a unit that leaves a file; the job and the unit's pid."""
        job_id = submit(client, plain_job("gated", max_attempts=1))
        (child,) = wait_for_start(misbehave_folder, number)
        (Path(f"/proc/{child}/cwd").resolve() / "checkpoint.pt").write_text("large")
        assert list(scratch.rglob("checkpoint.pt"))
        return job_id, child

    job_id, child = start(1)
    psutil.Process(psutil.Process(child).ppid()).kill()
    wait_for_state(client, job_id, "failed")
    assert [list(folder.iterdir()) for folder in scratch.iterdir()] == [[]]
    _job_id, child = start(2)
    worker.kill()
    wait_until_gone(child, timeout_s=20.0)
    own_service.start_worker(**other_host(misbehave_folder.parent / "second"))
    assert [list(folder.iterdir()) for folder in scratch.iterdir()] == [[]]
