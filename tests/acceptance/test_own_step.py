"""`--step train.py:make_step`: scripts as users write them, measured, profiled and snapshotted."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.commands import cli
from flopwatch import Flopwatch

pytestmark = pytest.mark.acceptance

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NAMED = {"gpt": "make_step", "accumulation": "make_step"}
PHASES = {"gpt": ["step"], "accumulation": ["backward", "rest"]}
BLOCK = 2 * 2 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 64 * 256 + 256 + 256 * 64 + 64
PARAMETERS = {"gpt": 65 * 64 + 64 * 64 + 2 * BLOCK + 2 * 64, "accumulation": 32 * 128 + 128 + 2 * 128 + 128 + 1}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(flopwatch: Flopwatch, kind: str, script: str, **fields: Any) -> dict[str, Any]:
    """Run a script's step as a job of this kind, to its end."""
    spec = {"kind": kind, "warmup_steps": 2, "measure_steps": 2, **fields}
    job = flopwatch.submit(spec, step=f"{SCRIPTS / script}.py:{NAMED[script]}")
    done = flopwatch.wait(job, timeout_s=120, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    return done


def numbers(flopwatch: Flopwatch, job: dict[str, Any]) -> dict[tuple[str, str | None], float | None]:
    rows = flopwatch.get(f"/jobs/{job['id']}/measurements")["rows"]
    return {(row["metric"], row["phase"]): row["median"] for row in rows}


def artifacts(flopwatch: Flopwatch, job: dict[str, Any]) -> set[str]:
    return {file["name"] for file in flopwatch.get(f"/jobs/{job['id']}/artifacts")["data"]}


@pytest.mark.parametrize("replicates", [1, 2], ids=["fork", "new interpreters"])
def test_a_step_that_freezes_the_time_takes_its_time(flopwatch: Flopwatch, replicates: int) -> None:
    """`replicates` are new interpreters; one is a fork of the warm parent."""
    spec = {"kind": "benchmark", "device": "cpu", "replicates": replicates, "warmup_steps": 1, "measure_steps": 3}
    job = flopwatch.submit(spec, step=f"{SCRIPTS}/frozen.py:make_step")
    done = flopwatch.wait(job, timeout_s=120, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    assert 20.0 <= numbers(flopwatch, done)["step_ms", "step"] < 2000.0  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", NAMED)
def test_scripts_are_measured_profiled_and_snapshotted(flopwatch: Flopwatch, script: str, device: str) -> None:
    job = run(flopwatch, "benchmark", script, device=device)
    measured = numbers(flopwatch, job)
    assert measured["step_ms", "step"]
    assert measured["parameters", None] == PARAMETERS[script]
    assert [phase for name, phase in measured if name == f"{phase}_ms" and phase not in ("step", "first_step")] == [
        phase for phase in PHASES[script] if phase != "step"
    ]
    assert bool(measured["tokens_per_s", None]) == (script == "gpt")
    profiled = run(flopwatch, "profile", script, device=device, profile_steps=1)
    shares = numbers(flopwatch, profiled)
    assert all((shares["work_ms", phase] or 0) > 0 for phase in PHASES[script])
    assert {"trace.json.gz", "flamegraph.svg"} <= artifacts(flopwatch, profiled)
    recorded = run(flopwatch, "memory", script, device=device, measure_steps=1)
    used = numbers(flopwatch, recorded)
    assert used["parameter_mib", None] == pytest.approx(4 * PARAMETERS[script] / 2**20, rel=0.01)
    snapshots = {f"snapshot-{phase}.pickle" for phase in ("initialisation", PHASES[script][0])}
    assert artifacts(flopwatch, recorded) >= snapshots


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
