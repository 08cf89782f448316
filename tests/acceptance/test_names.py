"""A project with `kernels.py`, `app/`, `workers/` and `parallel/`, whose names are those of our packages: what each
entrance measures is the project's own, which says so itself, and ours goes on measuring beside it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwatch import ClientError, Flopwatch
from flopwatch.packages import START

pytestmark = pytest.mark.acceptance

PROJECT = Path(__file__).resolve().parent.parent / "scripts" / "named"
QUICK = {"device": "cpu", "warmup_steps": 1, "measure_steps": 2}
GRID = {**QUICK, "dtypes": ["fp32"], "batch_size": 1, "head_dims": [16], "sequence_lengths": [16]}
ATTENTION = {"kind": "attention", "implementations": ["eager", "tiled"], **GRID}
KERNEL = {"kind": "kernel", "kernel": "rms_norm", "implementations": ["torch"], "rows": [8], "columns": [64]}
ENTRANCES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "step": ({"kind": "benchmark", **QUICK, "replicates": 2}, {"step": "train.py:make_step"}),
    "ddp": ({"kind": "ddp", "world_size": 2, "backend": "gloo", **QUICK}, {"step": "train.py:spawning"}),
    "script": ({"kind": "script", "device": "cpu"}, {"script": "script.py:__main__"}),
    "attention": (ATTENTION, {"implementation": "kernels.py:attention"}),
    "kernel": ({**KERNEL, **QUICK, "dtypes": ["fp32"]}, {"implementation": "mine.py:rms_norm"}),
    "model": ({"kind": "benchmark", "model": {"size": "tiny"}, **QUICK}, {"model": "mine.py:Model"}),
}
"""By entrance: the spec, and the code that goes with it."""


@pytest.mark.parametrize(
    "entrance", [pytest.param(one, marks=[pytest.mark.long] if one == "ddp" else []) for one in ENTRANCES]
)
def test_the_users_own_is_measured(flopwatch: Flopwatch, entrance: str) -> None:
    check_entrance(flopwatch, entrance)


def check_entrance(flopwatch: Flopwatch, entrance: str, timeout_s: float = 120) -> None:
    """Run a job, and see that what it has measured is the project's own."""
    spec, code = ENTRANCES[entrance]
    named = {role: f"{PROJECT}/{name}" for role, name in code.items()}
    job = flopwatch.submit(flopwatch.with_code(spec, code=PROJECT, **named))
    done = flopwatch.wait(job, timeout_s=timeout_s, show=lambda *_: None, check=False)
    assert done["state"] == "succeeded", done["error"]
    said = flopwatch.logs(done["id"])
    rows = flopwatch.get(f"/jobs/{done['id']}/measurements")["rows"]
    outcomes = {row["outcome"] for row in rows}
    assert "ok" in outcomes
    assert not outcomes & {"failed", "wrong", "crashed"}
    if entrance != "ddp":  # what ranks print is in files of their own
        assert "the project's own" in said
        assert "of Flopwatch: []" in said
    if entrance == "attention":
        assert {row["implementation"].partition("@")[0] for row in rows} == {"eager", "tiled", "attention"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({**ATTENTION, "implementations": ["eager", "triton"], "head_dims": [64]}, "kernels.py:attention"),
        ({**KERNEL, **QUICK, "implementations": ["torch", "triton"], "rows": [64]}, "mine.py:rms_norm"),
    ],
    ids=["attention", "kernel"],
)
def test_our_triton_kernels_run_beside_the_users(flopwatch: Flopwatch, spec: dict[str, Any], named: str) -> None:
    on_gpu = {**spec, "device": "cuda", "dtypes": ["bf16"]}
    job = flopwatch.submit(on_gpu, implementation=f"{PROJECT}/{named}", code=PROJECT)
    done = flopwatch.wait(job, timeout_s=300, show=lambda *_: None)
    rows = flopwatch.get(f"/jobs/{done['id']}/measurements")["rows"]
    measured = {row["implementation"].partition("@")[0] for row in rows if row["outcome"] == "ok"}
    assert measured == {*spec["implementations"], named.rpartition(":")[2]}
    assert "of Flopwatch: []" in flopwatch.logs(done["id"])


@pytest.mark.gpu
def test_our_model_with_triton_runs_in_the_projects_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-P", START, "app.cli", "run", "benchmark", "--preset", "tiny", "attention=triton"]
    command += ["device=cuda", "precision=bf16", "measure_steps=3", "--output", str(tmp_path)]
    environment = {**os.environ, "FLOPWATCH_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step_ms" in done.stdout


@pytest.mark.parametrize("name", ["flopwatch", "torch"])
def test_a_name_that_cannot_be_the_users_is_refused(flopwatch: Flopwatch, tmp_path: Path, name: str) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    (project / f"{name}.py").touch()
    with pytest.raises(ClientError, match=f"imports .*'{name}'.* of its folder, and a job has loaded another"):
        flopwatch.submit({"kind": "benchmark", **QUICK}, step=f"{project}/train.py:make_step", code=project)
