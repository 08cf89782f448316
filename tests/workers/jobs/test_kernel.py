"""The runner of `kernel` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.kernel import KernelSpec
from tests.workers.reporting import Report
from workers.jobs import kernel
from workers.jobs.kernel import RUNNER


def run(folder: Path, **fields: Any) -> Report:
    defaults = {"rows": [33], "columns": [20], "implementations": ["torch"], "warmup_steps": 1, "measure_steps": 3}
    spec = KernelSpec(**{**defaults, **fields})
    report = Report(folder)
    RUNNER.run(spec, RUNNER.plan(spec)[0], report)
    return report


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_pytorch_is_right(tmp_path: Path, dtype: str) -> None:
    report = run(tmp_path, dtypes=[dtype], rows=[1, 33], columns=[1, 700], device="cpu")
    assert len({tuple(row["case"].values()) for row in report.rows}) == 4
    for row in report.rows:
        assert row["outcome"] in {"ok", "unknown"}, row


def test_bandwidth_counts_what_has_to_be_read_and_written(tmp_path: Path) -> None:
    cell = run(tmp_path, device="cpu").cell()
    numbers = {"forward": 33 * 20 + 20 + 33, "backward": 2 * 33 * 20 + 2 * 20 + 33}
    numbers["forward_backward"] = sum(numbers.values())
    for phase, count in numbers.items():
        expected = 1e-6 * 4 * count / cell[f"{phase}_ms", phase]["min"]
        assert cell["gb_per_s", phase]["max"] == pytest.approx(expected)


def test_the_triton_kernel_needs_a_gpu(tmp_path: Path) -> None:
    report = run(tmp_path, implementations=["torch", "triton"], device="cpu")
    assert report.cell(implementation="triton")["forward_ms", "forward"]["outcome"] == "unsupported"
    assert report.cell(implementation="torch")["forward_ms", "forward"]["outcome"] == "ok"


def test_a_wrong_kernel_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "weighted_sum", lambda x, weight: (x * weight).sum(-1) + 1)
    assert {row["outcome"] for row in run(tmp_path, device="cpu").rows} == {"wrong", "ok"}


@pytest.mark.gpu
def test_the_triton_kernel_beside_plain_pytorch(tmp_path: Path) -> None:
    report = run(tmp_path, implementations=["torch", "triton"], columns=[1000], rows=[4097], device="cuda")
    for name in ("torch", "triton"):
        cell = report.cell(implementation=name)
        assert {row["outcome"] for row in cell.values()} == {"ok"}, torch.cuda.get_device_name()
