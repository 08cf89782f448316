"""`--implementation file.py:function` and `--step`, through the queue.

Where no worker allows it: tests/app/api/test_files.py. Faulty ones: tests/workers/jobs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from flopwatch import Flopwatch, alternating

SOURCE = """
import math

import torch


def right(q, k, v, is_causal):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        length = q.shape[-2]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.softmax(scores, dim=-1) @ v
"""
SPEC = {
    "kind": "attention",
    "implementations": ["eager"],
    "head_dims": [8],
    "sequence_lengths": [16],
    "dtypes": ["fp32"],
    "batch_size": 1,
    "warmup_steps": 1,
    "measure_steps": 2,
    "device": "cpu",
}


@pytest.fixture
def mine(tmp_path: Any) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def run(flopwatch: Flopwatch, named: str, **options: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Submit a job with eager and one's own code, and wait; returns it, and of each implementation a measurement."""
    job = flopwatch.submit(SPEC, implementation=named, **options)
    job = flopwatch.wait(job, timeout_s=60, show=lambda *_: None, check=False)
    rows = flopwatch.get(f"/jobs/{job['id']}/measurements")["rows"]
    return job, {row["implementation"].partition("@")[0]: row for row in rows if row["metric"] == "forward_ms"}


def test_right_code_is_measured_beside_the_others(flopwatch: Flopwatch, site: Any, mine: str) -> None:
    job, found = run(flopwatch, f"{mine}:right")
    assert job["state"] == "succeeded"
    assert {name: row["outcome"] for name, row in found.items()} == {"eager": "ok", "right": "ok"}
    assert (found["right"]["implementation"], found["right"]["code.file"]) == ("right@mine.py", "mine.py")
    assert found["eager"]["code.file"] is None
    shown: httpx.Response = site.client.get(job["links"]["code"])
    assert shown.text == SOURCE
    again = flopwatch.wait(flopwatch.rerun(job), timeout_s=60, show=lambda *_: None)
    rows = flopwatch.get(f"/jobs/{again['id']}/measurements")["rows"]
    assert {row["case_key"] for row in rows} == {row["case_key"] for row in found.values()}


STEP = """
import torch
from inner.size import SIZE


def make_step(device):
    x = torch.ones(SIZE, SIZE, device=device)
    return lambda: x @ x
"""


def test_revisions_of_a_repository_are_measured_in_turns(flopwatch: Flopwatch, tmp_path: Path) -> None:
    """The change is in a file that goes along."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "size.py").write_text("SIZE = 16\n")
    (tmp_path / "train.py").write_text(STEP)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    (tmp_path / "inner" / "size.py").write_text("SIZE = 17\n")
    own = ["--step", "train.py:make_step", "--code", ".", "--replicates", "1", "--json"]
    fields = ["benchmark", "warmup_steps=1", "measure_steps=2", "device=cpu"]
    ran = subprocess.run(
        [sys.executable, "-m", "app.cli", "--url", flopwatch.url, "versus", "main", ".", *own, "--", *fields],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    job = flopwatch.job(json.loads(ran.stdout)["job"])
    assert job["name"] == "main → ."
    old, new = (job["spec"][side]["step_code"]["revision"] for side in ("baseline", "candidate"))
    assert (old["label"], old["dirty"], new["dirty"], new["diff"]) == (
        *("main", False, True),
        "1 file changed, 1 insertion(+), 1 deletion(-)",
    )
    assert old["commit"] == new["commit"]
    compared = flopwatch.get("/compare", job=job["id"])
    assert compared["alternated"]
    assert [difference["name"] for difference in compared["differences"]] == ["version"]
    assert {row["baseline_outcome"] for row in compared["rows"]} == {"ok"}


def test_a_check_of_an_edited_file_goes_on_in_turns(flopwatch, mine, monkeypatch) -> None:
    monkeypatch.setattr(alternating, "FEWEST", 1)
    monkeypatch.setattr(alternating, "MOST", 1)
    kept, _ = run(flopwatch, f"{mine}:right")
    flopwatch.set_baseline("kept", job=kept)
    Path(mine).write_text(f"{SOURCE}\n# edited\n")
    edited, _ = run(flopwatch, f"{mine}:right")
    alone = flopwatch.check("kept", edited)
    assert alone["outcome"] == "inconclusive", "one process each; the edited file meets its baseline"
    assert flopwatch.can_alternate(alone)
    turns = flopwatch.check("kept", edited, alternate=True, show=lambda *_: None)
    assert [comparison["alternated"] for comparison in turns["comparisons"]] == [True]
    assert turns["jobs"] == [edited["id"]]
    assert turns["outcome"] == "inconclusive", "one process of each version cannot tell, in turns either"
    assert not flopwatch.can_alternate(turns)
    same = flopwatch.check("kept", kept)
    assert same["outcome"] == "inconclusive"
    assert not flopwatch.can_alternate(same), "there is no other version"
