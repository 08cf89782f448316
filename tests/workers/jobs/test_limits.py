"""Which peaks and ceilings bound a rate."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from app.specs.benchmark import BenchmarkSpec
from workers.jobs._limits import check_rate
from workers.jobs._training.metrics import add_shares, metrics_of
from workers.jobs._values import Values
from workers.measure import ceilings, environment
from workers.measure.ceilings import Ceilings

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ceilings, environment):
        monkeypatch.setattr(module, "device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setattr(ceilings, "_identity", lambda _device: "GPU-1")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("precision", "tflops", "ok"),
    [("bf16", 989.0, True), ("bf16", 990.0, False), ("fp32", 300.0, True), ("fp32", 500.0, False)],
)
def test_float32_is_bound_by_the_units_it_can_be_composed_from(tmp_path, precision, tflops, ok) -> None:
    """67 TFLOP/s is the peak of the H200's float32 units; TF32 reaches 495, three 16-bit products 330."""
    assert check_rate(tflops, precision, GPU, tmp_path).ok is ok


@pytest.mark.usefixtures("h200")
def test_a_gpus_float32_is_not_judged_by_a_ceiling_of_float32_alone(tmp_path: Path) -> None:
    Ceilings(tmp_path).record(GPU, {"fp32": 50.0}, None)
    assert check_rate(300.0, "fp32", GPU, tmp_path).ok
    Ceilings(tmp_path).record(GPU, {"bf16": 700.0}, None)
    assert check_rate(300.0, "fp32", GPU, tmp_path).ok, "TF32 is not measured"
    Ceilings(tmp_path).record(GPU, {"tf32": 400.0}, None)
    assert check_rate(400.0, "fp32", GPU, tmp_path).ok
    assert not check_rate(440.0, "fp32", GPU, tmp_path).ok
    assert not check_rate(740.0, "bf16", GPU, tmp_path).ok


def test_a_cpu_is_judged_by_what_was_measured(tmp_path: Path) -> None:
    Ceilings(tmp_path).record(CPU, {"fp32": 0.5, "bf16": 0.1}, None)
    assert not check_rate(6.0, "fp32", CPU, tmp_path).ok
    assert check_rate(4.0, "bf16", CPU, tmp_path).ok, "torch's attention computes with float32 where 16 bits are slow"
    assert not check_rate(6.0, "bf16", CPU, tmp_path).ok
    assert check_rate(9.0, "fp16", CPU, tmp_path).ok, "its own units are not measured"
    assert check_rate(0.2, "tf32", CPU, tmp_path / "none").severity == "not_judged"


def test_a_rate_whose_products_nobody_saw_is_not_judged(tmp_path: Path) -> None:
    values = Values(metrics_of(BenchmarkSpec()))
    (check,) = add_shares(values, 1e9, ({}, "the profiler saw none"), torch.device("cpu"), tmp_path)
    assert (check.name, check.severity, check.detail) == ("ceiling", "not_judged", "the profiler saw none")
