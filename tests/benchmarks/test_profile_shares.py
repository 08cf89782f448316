"""The jobs behind the published profiles are jobs that the service takes, and their results fit the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import spec_adapter
from app.specs.profile import ProfileSpec
from benchmarks import profile_shares
from benchmarks.profile_shares import measure, number, ratio, specs
from tests.benchmarks.here import run_here
from workers.measure.ceilings import Ceilings

TINY = {"device": "cpu", "batch_size": 1, "warmup_steps": 1, "measure_steps": 2, "profile_steps": 1, "stacks": False}


def test_every_job_is_a_valid_spec_of_a_case_of_its_own() -> None:
    found = [spec_adapter.validate_json(json.dumps(spec)) for spec in specs(["small", "xl"], [128, 1024], TINY)]
    assert len({spec.case().key for spec in found}) == 8
    assert all(isinstance(spec, ProfileSpec) for spec in found)


def test_results_fill_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Ceilings(tmp_path / "ceilings").record(torch.device("cpu"), {"fp32": 0.05}, 10.0)
    monkeypatch.setattr(profile_shares, "run", run_here(tmp_path))
    measure(specs(["tiny"], [16], TINY), 60.0, tmp_path / "saved.jsonl")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    work = [row[2] for row in cells if row[:2] == ["tiny", "16"] and len(row) == 13]
    assert work == ["inference", "forward", "forward + backward", "full step"]
    (attention,) = [row for row in cells if row[0] == "size" and "softmax / products, FLOPs" in row]
    place = attention.index("softmax / products, FLOPs")
    found = {row[3]: row[place] for row in cells if row[:3] == ["tiny", "16", "train_step"] and len(row) > place + 1}
    # 5 by 2 · 2 · 32 FLOPs for each score forward, 4 by 4 · 2 · 32 backward; the head dimension is 32.
    assert found["forward"] == number(5 / 128)
    assert found["backward"] == number(4 / 256)
    assert len((tmp_path / "saved.jsonl").read_text().splitlines()) == 2


def test_a_job_that_fails_stands_below_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("exit code 1: no GPU")

    monkeypatch.setattr(profile_shares, "run", fail)
    measure(specs(["tiny"], [16], TINY), 60.0, None)
    assert capsys.readouterr().out.count("exit code 1: no GPU") == 2


def test_what_is_unknown_is_not_a_number() -> None:
    assert (number(None), number(0.12345), number(12345.6)) == ("unknown", "0.123", "12346")
    assert ratio({"scores": None, "softmax": 1.0, "values": 1.0}) == "unknown"
    assert ratio({"scores": 0.0, "softmax": 1.0, "values": 0.0}) == "unknown"
    assert ratio({"scores": 1.0, "softmax": 1.0, "values": 3.0}) == "0.25"
