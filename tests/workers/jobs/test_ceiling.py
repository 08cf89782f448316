"""The runner of `ceiling` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.ceiling import CeilingSpec
from tests.workers.reporting import Report
from workers.jobs import ceiling
from workers.jobs.ceiling import RUNNER
from workers.measure.ceilings import Ceilings

SMALL = {"matrix_size": 64, "copy_mib": 1, "warmup_steps": 1, "measure_steps": 5}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path))

    def run(**fields: Any) -> Report:
        spec = CeilingSpec(**{**SMALL, **fields})
        report = Report(tmp_path)
        RUNNER.run(spec, RUNNER.plan(spec)[0], report)
        return report

    precision = torch.get_float32_matmul_precision()
    yield run
    torch.set_float32_matmul_precision(precision)


class Stopwatch:
    """Each call takes 2 ms; the last one `last`."""

    def __init__(self, last: float = 2.0) -> None:
        self.last = last

    def time(self, work: Any, *, prepare: Any, warmup: int, calls: int) -> list[float]:
        work()
        return (calls - 1) * [2.0] + [self.last]


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """An undisturbed host whose own sizes are small."""
    watch = Stopwatch()
    monkeypatch.setattr("workers.measure.operations.stopwatch", lambda device: watch)
    monkeypatch.setattr(ceiling, "COPY_MIB", {"cpu": 1})
    monkeypatch.setattr(ceiling, "CPU_MATRIX_SIZES", (64,))
    return watch


OWN_SIZES = {"matrix_size": None, "copy_mib": None, "device": "cpu"}


def test_rates_are_reported_and_kept_for_later_jobs(run, tmp_path: Path, steady: Stopwatch) -> None:
    report = run(dtypes=["fp32", "bf16"], **OWN_SIZES)
    assert [(row["case"]["operation"], row["case"]["dtype"], row["metric"], row["unit"]) for row in report.rows] == [
        ("copy", "fp32", "copy_gb_per_s", "GB/s"),
        ("matrix product", "fp32", "tflops", "TFLOP/s"),
        ("matrix product", "bf16", "tflops", "TFLOP/s"),
    ]
    assert {(row["outcome"], row["n"]) for row in report.rows} == {("ok", 5)}
    kept = Ceilings(tmp_path / "ceilings").read(torch.device("cpu"))
    assert kept is not None
    assert kept.copy_gb_per_s is not None
    found = [kept.copy_gb_per_s.value, kept.tflops["fp32"].value, kept.tflops["bf16"].value]
    assert found == pytest.approx([row["median"] for row in report.rows])
    assert report.steps[-1] == (3, 3, "done")
    assert report.verdict["checks"]


@pytest.mark.parametrize(
    ("sizes", "kept", "log"),
    [
        ({"matrix_size": 32}, {"copy"}, "fp32: not recorded as this device's ceiling: matrix_size was chosen"),
        ({"copy_mib": 2}, {"fp32"}, "copy: not recorded as this device's ceiling: copy_mib was chosen"),
        ({"matrix_size": 32, "copy_mib": 2}, set(), "copy_mib was chosen"),
        ({"measure_steps": 1}, set(), "1 samples are too few"),
    ],
)
def test_a_toy_run_is_no_ceiling(
    run,
    tmp_path: Path,
    steady: Stopwatch,
    capsys: pytest.CaptureFixture,
    sizes: dict[str, int],
    kept: set[str],
    log: str,
) -> None:
    ceilings, cpu = Ceilings(tmp_path / "ceilings"), torch.device("cpu")
    ceilings.record(cpu, {"fp32": 123.0}, 456.0)
    report = run(dtypes=["fp32"], **{**OWN_SIZES, **sizes})
    assert {row["outcome"] for row in report.rows} == {"ok"}, "it is reported all the same"
    found = ceilings.read(cpu)
    assert found is not None
    assert found.copy_gb_per_s is not None
    assert (found.tflops["fp32"].value != 123.0) == ("fp32" in kept)
    assert (found.copy_gb_per_s.value != 456.0) == ("copy" in kept)
    assert log in capsys.readouterr().err


def test_a_disturbed_run_is_no_ceiling(run, tmp_path: Path, steady: Stopwatch, capsys: pytest.CaptureFixture) -> None:
    steady.last = 10.0
    report = run(dtypes=["fp32"], **OWN_SIZES)
    assert report.verdict["verdict"] == "suspect"
    assert Ceilings(tmp_path / "ceilings").read(torch.device("cpu")) is None
    log = capsys.readouterr().err
    assert "fp32: not recorded as this device's ceiling: something disturbed it: coefficient of variation" in log
    steady.last = 2.0
    run(dtypes=["fp32"], **OWN_SIZES)
    assert Ceilings(tmp_path / "ceilings").read(torch.device("cpu")) is not None
    assert capsys.readouterr().err == ""


def test_what_rates_mean(run, steady: Stopwatch) -> None:
    copy, product = run(dtypes=["fp32"], device="cpu").rows
    assert copy["median"] == pytest.approx(2 * 2**20 / 2e-3 / 1e9)
    assert product["median"] == pytest.approx(2 * 64**3 / 2e-3 / 1e12)


def test_what_the_device_lacks_is_an_outcome_and_no_ceiling(run, tmp_path: Path, steady: Stopwatch) -> None:
    report = run(dtypes=["tf32", "fp32"], **OWN_SIZES)
    outcomes = {row["case"]["dtype"]: row["outcome"] for row in report.rows if row["metric"] == "tflops"}
    assert outcomes == {"tf32": "unsupported", "fp32": "ok"}
    ceilings = Ceilings(tmp_path / "ceilings")
    assert [ceilings.tflops(torch.device("cpu"), name)[0] is None for name in ("tf32", "fp32")] == [True, False]


def test_running_out_of_memory_is_an_outcome(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(ceiling.Bench, "_make_product", fail)
    rows = run(dtypes=["fp32"], device="cpu").rows
    assert [row["outcome"] for row in rows] == ["ok", "oom"]


def test_a_processor_gets_matrices_that_take_long_enough(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "LONG_ENOUGH_S", 1e-9)
    assert run(matrix_size=None, dtypes=["fp32"], device="cpu").rows[-1]["case"]["matrix_size"] == 256
    monkeypatch.setattr(ceiling, "CPU_MATRIX_SIZES", (32, 64))
    monkeypatch.setattr(ceiling, "LONG_ENOUGH_S", 1e9)
    assert run(matrix_size=None, dtypes=["fp32"], device="cpu").rows[-1]["case"]["matrix_size"] == 64


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.measure.validity.MAX_VARIATION", 100)  # other tests may be at work on this GPU
    report = run(matrix_size=None, copy_mib=None, device="cuda")
    assert {row["outcome"] for row in report.rows} == {"ok"}
    rates = {row["case"]["dtype"]: row["median"] for row in report.rows if row["metric"] == "tflops"}
    assert rates["bf16"] > rates["fp32"]
    assert Ceilings(tmp_path / "ceilings").tflops(torch.device("cuda", 0), "bf16")[0] == pytest.approx(rates["bf16"])
