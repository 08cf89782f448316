"""The runner of `kernel` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the service's dependencies are not installed")

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
    whole = sum(numbers.values())
    for phase, name, count in (
        *((name, name, count) for name, count in numbers.items()),
        (None, "forward_backward", whole),
    ):
        expected = 1e-6 * 4 * count / cell[f"{name}_ms", name]["median"]
        assert cell["gb_per_s", phase]["median"] == pytest.approx(expected)
        assert cell["gb_per_s", phase]["n"] == 1


def test_forward_alone_is_the_whole_work_of_its_mode(tmp_path: Path) -> None:
    cell = run(tmp_path, mode="forward", device="cpu").cell()
    expected = 1e-6 * 4 * (33 * 20 + 20 + 33) / cell["forward_ms", "forward"]["median"]
    assert cell["gb_per_s", None]["median"] == cell["gb_per_s", "forward"]["median"] == pytest.approx(expected)


def test_a_kernel_that_changes_its_inputs_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoils(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = (x * weight.clone()).sum(-1)
        weight.data.neg_()
        return out

    monkeypatch.setattr(kernel, "weighted_sum", spoils)
    row = run(tmp_path, device="cpu").cell()["forward_ms", "forward"]
    assert row["outcome"] == "wrong"
    assert row["reason"].startswith("it changed input 1 in place")


def test_the_triton_kernel_needs_a_gpu(tmp_path: Path) -> None:
    report = run(tmp_path, implementations=["torch", "triton"], device="cpu")
    assert report.cell(implementation="triton")["forward_ms", "forward"]["outcome"] == "unsupported"
    assert report.cell(implementation="torch")["forward_ms", "forward"]["outcome"] == "ok"


def test_a_wrong_kernel_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "weighted_sum", lambda x, weight: (x * weight).sum(-1) + 1)
    report = run(tmp_path, device="cpu")
    assert {row["metric"] for row in report.rows if row["outcome"] == "ok"} == {"output_error", "gradient_error"}
    assert {row["outcome"] for row in report.rows} == {"wrong", "ok"}


@pytest.mark.gpu
def test_the_triton_kernel_beside_plain_pytorch(tmp_path: Path) -> None:
    report = run(tmp_path, implementations=["torch", "triton"], columns=[1000], rows=[4097], device="cuda")
    for name in ("torch", "triton"):
        cell = report.cell(implementation=name)
        assert {row["outcome"] for row in cell.values()} == {"ok"}, torch.cuda.get_device_name()
        assert cell["memory_reserved_mib", None]["median"] >= cell["peak_memory_mib", None]["median"]
