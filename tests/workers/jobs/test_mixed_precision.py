"""The runner of `mixed_precision` in this process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs._training import ModelSpec
from app.specs.mixed_precision import MixedPrecisionSpec
from tests.workers.reporting import Report, reported
from workers.jobs.mixed_precision import RUNNER
from workers.measure.float8_ranges import range_of

MODEL = ModelSpec(d_model=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
NARROW = {"fp16": "float16", "bf16": "bfloat16"}


@pytest.fixture
def run(tmp_path: Path):
    usual = {"model": MODEL, "batch_size": 2, "context_length": 8, "device": "cpu"}
    return lambda unit=None, **fields: reported(MixedPrecisionSpec(**{**usual, **fields}), tmp_path, unit)


def dtypes(report: Report, **values: Any) -> dict[str, Any]:
    """The data types of the rows that have these values, by name."""
    return {row["name"]: row["dtype"] for row in report.table_rows("dtypes", **values)}


def test_float8_has_what_8_bits_lose_of_each_factor(run) -> None:
    report = run(accumulations=[], audits=["transformer"], autocasts=["none", "bf16"])
    rows = {(row["layer"], row["tensor"]): row for row in report.table_rows("float8")}
    assert {row["autocast"] for row in rows.values()} == {"bf16"}
    assert {tensor for layer, tensor in rows if layer == "layers.0.ffn.w1"} == {"input", "weight", "grad_output"}
    weight, grad = rows["lm_head", "weight"], rows["lm_head", "grad_output"]
    assert (weight["format"], grad["format"]) == ("e4m3fn", "e5m2")
    assert weight["scale"] * weight["largest"] == pytest.approx(448)
    assert grad["scale"] * grad["largest"] == pytest.approx(57344)


def test_underflow_and_overflow_are_those_of_the_formats() -> None:
    """e4m3fn: the least number is 2^-9, half of it rounds to 0, and the largest is 448. The scale is 448 / 896 here."""
    numbers = torch.tensor([0.0, 2**-11, 2**-9, 1.0, 500.0, -896.0])
    found = range_of("layer", "input", numbers)
    assert (found.largest, found.scale) == (896.0, 0.5)
    assert found.underflow_percent == pytest.approx(100 * 2 / 5)
    assert found.underflow_unscaled_percent == pytest.approx(100 * 1 / 5)
    assert found.overflow_unscaled_percent == pytest.approx(100 * 2 / 6)
    assert range_of("layer", "input", torch.zeros(3)).scale is None
    assert range_of("layer", "input", torch.tensor([1.0, math.nan])).scale is None


def test_a_thousand_hundredths(run, device: str) -> None:
    report = run(audits=[], device=device)
    expected = {
        "fp32": ("10.0001", 35 / 2**18),
        "fp16": ("9.9531", -3 / 64),
        "fp16_into_fp32": ("10.0021", 35 / 2**14),
        "fp16_cast_to_fp32": ("10.0021", 35 / 2**14),
    }
    for name, (shown, error) in expected.items():
        cell = report.cell(accumulation=name)
        assert list(cell) == [(metric, None) for metric in ("sum", "error", "rounding_error", "adding_error")]
        assert f"{cell['sum', None]['median']:.4f}" == shown
        assert cell["error", None]["median"] == error
        assert cell["rounding_error", None]["median"] + cell["adding_error", None]["median"] == error
        assert {row["outcome"] for row in cell.values()} == {"ok"}
        assert report.check("repeated", accumulation=name)["ok"]
    (narrow,) = report.table_rows("accumulations", accumulation="fp16_into_fp32")
    assert (narrow["addend_dtype"], narrow["sum_dtype"]) == ("float16", "float32")
    assert (narrow["error_digits"], narrow["adding_error"]) == ("0.00213623046875", 0)
    assert not RUNNER.timed, "no load of the host disturbs a sum"


def test_an_overflow_is_null_with_its_reason(run) -> None:
    report = run(audits=[], accumulations=["fp16", "fp32"], addend=60_000.0, additions=2)
    narrow = report.cell(accumulation="fp16")
    assert {(row["outcome"], row["reason"]) for row in narrow.values()} == {
        ("unknown", "the sum overflowed float16: inf")
    }
    assert report.cell(accumulation="fp32")["sum", None]["median"] == 120_000
    (row,) = report.table_rows("accumulations", accumulation="fp16")
    assert (row["sum"], row["error_digits"], row["right_sum"]) == (None, None, "120000")


def test_sums_that_differ_when_they_are_repeated_are_invalid(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.measure import accumulation

    real, addends = accumulation.accumulate, iter([0.01, 0.02])
    monkeypatch.setattr(
        accumulation, "accumulate", lambda how, _, additions, device: real(how, next(addends), additions, device)
    )
    assert run(audits=[], accumulations=["fp32"]).verdict_on(accumulation="fp32")["verdict"] == "invalid"


@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_the_toy_under_the_cpus_autocast(run, autocast: str) -> None:
    """A CPU's autocast computes layer norm in the narrow type; CUDA's does not."""
    report = run(accumulations=[], audits=["toy"], autocasts=["none", autocast])
    narrow = NARROW[autocast]
    where = {"model": "toy", "autocast": autocast, "device": "cpu"}
    weights = ["fc1.weight", "ln.weight", "ln.bias", "fc2.weight"]
    assert dtypes(report, **where, tensor="parameter") == dict.fromkeys(weights, "float32")
    assert dtypes(report, **where, tensor="module_output") == dict.fromkeys(["fc1", "relu", "ln", "fc2"], narrow)
    assert dtypes(report, **where, tensor="logits") == {"": narrow}
    assert dtypes(report, **where, tensor="loss") == {"": "float32"}
    assert dtypes(report, **where, tensor="scaled_loss") == ({"": "float32"} if autocast == "fp16" else {})
    assert dtypes(report, **where, tensor="gradient") == dict.fromkeys(weights, "float32")
    on_cuda = {row["name"]: row["cuda_dtype"] for row in report.table_rows("dtypes", **where, tensor="module_output")}
    assert on_cuda == {"fc1": narrow, "relu": None, "ln": "float32", "fc2": narrow}, "as CUDA's test below finds"
    assert report.table_rows("kept-in-float32") == []
    without = report.table_rows("dtypes", autocast="none")
    assert {(row["dtype"], row["kept_in_float32"]) for row in without} == {("float32", None)}
    found = {metric: row["median"] for (metric, _), row in report.cell(audit="toy", autocast=autocast).items()}
    assert found == {"modules_in_float32": 0, "modules": 4, "parameters_in_float32": 4, "gradients_in_float32": 4}
    assert report.cell(audit="toy", autocast="none")["modules_in_float32", None]["median"] == 4


@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_norms_and_embeddings_stay_in_float32(run, autocast: str, device: str) -> None:
    report = run(accumulations=[], audits=["transformer"], autocasts=[autocast], device=device)
    where = {"model": "transformer", "autocast": autocast, "device": device}
    assert [(row["name"], row["module_class"]) for row in report.table_rows("kept-in-float32", **where)] == [
        ("token_embeddings", "Embedding"),
        ("layers.0.ln1", "RMSNorm"),
        ("layers.0.ln2", "RMSNorm"),
        ("ln_final", "RMSNorm"),
    ]
    outputs = dtypes(report, **where, tensor="module_output")
    assert outputs["layers.0"] == "float32", "the residual stream"
    assert outputs["layers.0.attn"] == outputs["layers.0.ffn"] == outputs["layers.0.ffn.w1"] == NARROW[autocast]
    assert dtypes(report, **where, tensor="logits") == {"": NARROW[autocast]}
    assert dtypes(report, **where, tensor="loss") == {"": "float32"}
    for tensor in ("parameter", "gradient"):
        found = dtypes(report, **where, tensor=tensor)
        assert len(found) == 12
        assert set(found.values()) == {"float32"}
    assert report.cell(audit="transformer")["modules", None]["median"] == 12


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_the_toy_under_cudas_autocast(run, autocast: str) -> None:
    report = run(accumulations=[], audits=["toy"], autocasts=[autocast], device="cuda")
    narrow = NARROW[autocast]
    assert dtypes(report, device="cuda", tensor="module_output") == {
        "fc1": narrow,
        "relu": narrow,
        "ln": "float32",
        "fc2": narrow,
    }
    assert [row["name"] for row in report.table_rows("kept-in-float32")] == ["ln"]
    assert dtypes(report, tensor="logits") == {"": narrow}
    assert dtypes(report, tensor="loss") == {"": "float32"}
    assert dtypes(report, tensor="scaled_loss") == ({"": "float32"} if autocast == "fp16" else {})
    assert set(dtypes(report, tensor="gradient").values()) == {"float32"}
