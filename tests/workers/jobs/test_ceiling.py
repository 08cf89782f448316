"""The runner of `ceiling` in this process."""

import itertools
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.ceiling import CeilingSpec
from tests.workers.reporting import reported
from workers.jobs import ceiling
from workers.measure import validity
from workers.measure.ceilings import Ceilings
from workers.measure.stopwatch import Timing
from workers.measure.validity import HostLoad

SMALL = {"matrix_size": 64, "copy_mib": 1, "warmup_steps": 1, "measure_steps": 5}


@pytest.fixture
def run(tmp_path: Path):
    return lambda unit=None, **fields: reported(CeilingSpec(**{**SMALL, **fields}), tmp_path, unit)


class Watch:
    """A stopwatch that finds 2 ms in each call but every second one, which takes `other`."""

    def __init__(self) -> None:
        self.other = 2.0
        self.steady: bool | None = True

    def time(self, work: Any, *, warmup: int | None, calls: int, **_: Any) -> Timing:
        work()
        return Timing(
            array("d", [self.other if call % 2 else 2.0 for call in range(calls)]),
            None,
            5,
            self.steady,
            host_bound=False,
        )


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What an undisturbed host finds whose own sizes are small."""
    watch = Watch()
    monkeypatch.setattr(validity, "MIN_LOAD_SPAN_S", math.inf)
    monkeypatch.setattr("workers.measure.stopwatch.stopwatch", lambda device: watch)
    monkeypatch.setattr(ceiling, "COPY_MIB", {"cpu": 1})
    monkeypatch.setattr(ceiling, "MATRIX_SIZES", {"cpu": dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 64)})
    return watch


OWN_SIZES = {"matrix_size": None, "copy_mib": None, "device": "cpu"}


def test_rates_are_reported_and_kept_for_later_jobs(run, tmp_path: Path, watch: Watch) -> None:
    report = run(dtypes=["fp32", "bf16"], **OWN_SIZES)
    asked = {"matrix_size": None, "copy_mib": None}
    copy = report.cell(operation="copy", dtype=None, **asked)
    products = [report.cell(operation="matrix product", dtype=dtype, **asked) for dtype in ("fp32", "bf16")]
    assert list(copy) == [("copy_gb_per_s", None), ("copy_ms", "copy"), ("host_us", None), ("copy_mib", None)]
    for product in products:
        assert list(product) == [("tflops", None), ("product_ms", "product"), ("host_us", None), ("matrix_size", None)]
        assert product["matrix_size", None]["median"] == 64
        assert product["product_ms", "product"]["n"] == 5, "raw times are kept"
    assert copy["copy_mib", None]["median"] == 1
    kept = Ceilings(tmp_path / "ceilings").read(torch.device("cpu"))
    assert kept.copy_gb_per_s.value == pytest.approx(copy["copy_gb_per_s", None]["median"])
    for dtype, product in zip(("fp32", "bf16"), products, strict=True):
        assert kept.tflops[dtype].value == pytest.approx(product["tflops", None]["median"])
        times = product["product_ms", "product"]
        rates = [2e-9 * 64**3 / times[name] for name in ("min", "max")]
        assert kept.tflops[dtype].spread == pytest.approx(rates[0] - rates[1])
    assert sorted(report.titles.values()) == ["copy", "matrix product, bf16", "matrix product, fp32"]


@pytest.mark.parametrize(
    ("sizes", "kept", "log"),
    [
        ({"matrix_size": 32}, {"copy"}, "fp32: not recorded as this device's ceiling: matrix_size was chosen"),
        ({"copy_mib": 2}, {"fp32"}, "copy: not recorded as this device's ceiling: copy_mib was chosen"),
        ({"matrix_size": 32, "copy_mib": 2}, set(), "copy_mib was chosen"),
        ({"measure_steps": 1}, set(), "1 samples are too few"),
    ],
)
def test_a_toy_run_is_no_ceiling(run, tmp_path, watch, capsys, sizes, kept, log) -> None:
    ceilings, cpu = Ceilings(tmp_path / "ceilings"), torch.device("cpu")
    ceilings.record(cpu, {"fp32": 123.0}, 456.0)
    report = run(dtypes=["fp32"], **{**OWN_SIZES, **sizes})
    assert {row["outcome"] for row in report.rows} == {"ok", "unknown"}, "it is reported all the same"
    assert {row["metric"] for row in report.rows if row["outcome"] == "unknown"} == {"host_us"}
    found = ceilings.read(cpu)
    assert (found.tflops["fp32"].value != 123.0) == ("fp32" in kept)
    assert (found.copy_gb_per_s.value != 456.0) == ("copy" in kept)
    assert log in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "steady", "failed"), [(10.0, True, "variation: "), (2.0, False, "steady: times still")]
)
def test_a_disturbed_run_is_no_ceiling(run, tmp_path, watch, capsys, other, steady, failed) -> None:
    watch.other, watch.steady = other, steady
    report = run(dtypes=["fp32"], **OWN_SIZES)
    assert report.verdict_on(operation="copy")["verdict"] == "suspect"
    assert report.verdict_on(operation="matrix product")["verdict"] == "suspect"
    assert Ceilings(tmp_path / "ceilings").read(torch.device("cpu")) is None
    log = capsys.readouterr().err
    assert f"fp32: not recorded as this device's ceiling: something disturbed it: {failed}" in log
    watch.other, watch.steady = 2.0, None
    run(dtypes=["fp32"], **OWN_SIZES)
    assert Ceilings(tmp_path / "ceilings").read(torch.device("cpu")) is not None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("others", [2.0, 0.5])
def test_beside_other_load_there_is_no_ceiling(run, tmp_path, watch, capsys, monkeypatch, others) -> None:
    """Also where the others use less than the unit, which is a note for other kinds."""
    loads = (HostLoad(number * (others + 1.0), 1.0 * number, 4.0 * number) for number in itertools.count())
    monkeypatch.setattr(validity, "read_host_load", lambda: next(loads))
    monkeypatch.setattr(validity, "MIN_LOAD_SPAN_S", 0.0)
    ceilings, cpu = Ceilings(tmp_path / "ceilings"), torch.device("cpu")
    ceilings.record(cpu, {"fp32": 123.0}, None)
    run(dtypes=["fp32"], **OWN_SIZES)
    found = ceilings.read(cpu)
    assert (found.tflops["fp32"].value, found.copy_gb_per_s) == (123.0, None), "the former ones stay"
    assert "not recorded as this device's ceiling: something disturbed it: host_load: other processes used" in (
        capsys.readouterr().err
    )


def test_what_rates_mean(run, watch: Watch) -> None:
    watch.other = 50.0
    report = run(dtypes=["fp32"], device="cpu")
    copy, product = report.cell(operation="copy"), report.cell(operation="matrix product")
    assert copy["copy_gb_per_s", None]["mean"] == pytest.approx(2 * 2**20 / 2e-3 / 1e9), "by the median time"
    assert product["tflops", None]["mean"] == pytest.approx(2 * 64**3 / 2e-3 / 1e12)


def test_what_the_device_lacks_is_an_outcome_and_no_ceiling(run, tmp_path: Path, watch: Watch) -> None:
    report = run(dtypes=["tf32", "fp32"], **OWN_SIZES)
    outcomes = {row["case"]["dtype"]: row["outcome"] for row in report.rows if row["metric"] == "tflops"}
    assert outcomes == {"tf32": "unsupported", "fp32": "ok"}
    ceilings = Ceilings(tmp_path / "ceilings")
    assert [ceilings.tflops(torch.device("cpu"), name)[0] is None for name in ("tf32", "fp32")] == [True, False]


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests may be at work on this GPU: what they disturb counts here.
    monkeypatch.setattr(ceiling, "check_timing", lambda _timing, _device: [])
    report = run(matrix_size=None, copy_mib=None, device="cuda")
    assert {row["outcome"] for row in report.rows} == {"ok"}
    rates = {dtype: report.cell(dtype=dtype)["tflops", None]["median"] for dtype in ("fp32", "bf16")}
    assert rates["bf16"] > rates["fp32"]
    assert Ceilings(tmp_path / "ceilings").tflops(torch.device("cuda", 0), "bf16")[0] == pytest.approx(rates["bf16"])
    assert (
        report.cell(dtype="bf16")["host_us", None]["median"]
        < 1e3 * report.cell(dtype="bf16")["product_ms", "product"]["median"]
    )


def test_a_cpu_has_no_rate_of_fp8(run: Any) -> None:
    rows = run(dtypes=["fp8", "fp8_rowwise"], copy_mib=1, matrix_size=16, device="cpu").rows
    reasons = {row["case"]["dtype"]: row["reason"] for row in rows if row["metric"] == "tflops"}
    assert reasons["fp8_rowwise"] == "fp8_rowwise: a CPU only emulates it, so it has no such rate"
    assert set(reasons) == {"fp8", "fp8_rowwise"}
