"""`--step train.py:make_step`: steps and scripts as users write them."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.commands import cli
from flopwatch import Flopwatch

pytestmark = pytest.mark.acceptance

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def numbers(flopwatch: Flopwatch, job: dict[str, Any]) -> dict[tuple[str, str | None], float | None]:
    rows = flopwatch.get(f"/jobs/{job['id']}/measurements")["rows"]
    return {(row["metric"], row["phase"]): row["median"] for row in rows}


@pytest.mark.parametrize("replicates", [1, 2], ids=["fork", "new interpreters"])
def test_a_step_that_freezes_the_time_takes_its_time(flopwatch: Flopwatch, replicates: int) -> None:
    """`replicates` are new interpreters; one is a fork of the warm parent."""
    spec = {"kind": "benchmark", "device": "cpu", "replicates": replicates, "warmup_steps": 1, "measure_steps": 3}
    job = flopwatch.submit(spec, step=f"{SCRIPTS}/frozen.py:make_step")
    done = flopwatch.wait(job, timeout_s=120, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    assert 20.0 <= numbers(flopwatch, done)["step_ms", "step"] < 2000.0  # type: ignore[operator]


UNTIDY = """
import os
import sys

import torch


def make_step(device):
    model = torch.nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.chdir("/")
    os.environ.clear()
    sys.stdout.close()

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 7, dtype=torch.float32, device="cpu")).sum().backward()
        optimizer.step()

    return step
"""


@pytest.mark.parametrize("kind", ["benchmark", "memory", "profile"])
def test_a_step_may_change_its_process(flopwatch: Flopwatch, tmp_path: Path, kind: str) -> None:
    """Defaults of torch, folder, environment and output: what is measured afterwards is right, and arrives."""
    (tmp_path / "train.py").write_text(UNTIDY)
    spec = {"kind": kind, "device": "cpu", "warmup_steps": 1, "measure_steps": 1}
    job = flopwatch.submit(spec, step=f"{tmp_path / 'train.py'}:make_step")
    done = flopwatch.wait(job, timeout_s=60, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    if kind != "profile":
        assert numbers(flopwatch, done)["parameters", None] == 7 * 3 + 3


MEASURED = """
import sys

import torch

import flopwatch

model = torch.nn.Linear(16, 16)
print("it trains with", sys.argv[1:])


def step():
    with flopwatch.phase("forward"):
        model(torch.randn(8, 16))


flopwatch.measure(step, measure_steps=5)
"""


def test_a_script_runs_through_the_queue(flopwatch: Flopwatch, site: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEASURED)
    words = ["run-script", str(script), "--device", "cpu", "--", "--lr", "1 or 2"]
    ran = CliRunner().invoke(cli, words, env={"FLOPWATCH_URL": str(site.client.base_url)})
    assert ran.exit_code == 0, ran.stderr
    assert "it trains with ['--lr', '1 or 2']" in ran.stdout
    job = flopwatch.list_jobs(kind="script", limit=1)[0]
    assert "it trains with" in flopwatch.logs(job["id"])
    measured = numbers(flopwatch, job)
    assert measured["forward_ms", "forward"]
    assert measured["parameters", None] == 16 * 16 + 16
