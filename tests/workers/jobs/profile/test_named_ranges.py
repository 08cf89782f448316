"""Ranges that people write in their attention, by any of three means and with any name, and kernels by range."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.specs import spec_adapter
from tests.workers.reporting import Report, reported, uploading, with_ceilings

SOURCE = """
import contextlib
import math

import torch
from torch.cuda import nvtx

import flopwatch


@nvtx.range("scaled dot product attention")
def attention(q, k, v, is_causal):
    with flopwatch.phase("computing attention scores"):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
    with torch.profiler.record_function("softmax"):
        weights = scores.softmax(-1)
    with contextlib.ExitStack() as ranges:
        for name in TAKEN:
            ranges.enter_context(torch.profiler.record_function(name))
        weights = weights * 1.0
    with nvtx.range("final matmul"), torch.profiler.record_function("forward"):
        return weights @ v
"""
TAKEN = (
    *("step_1", "step_2", "step_7", "warmup", "ProfilerStep#2", "backward", "forward", "optimizer", "step", "layers.0"),
    *("", " ", "two\nlines", "x" * 5000, "outside", "π; | / ‡"),
    *("cudaLaunchKernel", "[memory]", "aten::mm", "nccl:mine"),
    *("Optimizer.step#mine", "autograd::engine::evaluate_function: mine", "Torch-Compiled Region: mine", "-"),
)
"""Names that our steps, phases and layers have, or events of the profiler."""
SOURCE += f"TAKEN = {TAKEN!r}\n"
OUTER = "scaled dot product attention"
ALL = (OUTER, "computing attention scores", "softmax", "final matmul", "forward")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("ranges")
    with uploading(folder / "code") as upload:
        code = upload(SOURCE, "attention")
        model = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 31}
        fields: dict[str, Any] = {"model": model, "batch_size": 2, "context_length": 12, "device": "cpu"}
        fields |= {"mode": "forward_backward", "warmup_steps": 1, "measure_steps": 3, "profile_steps": 2}
        spec = spec_adapter.validate_json(
            json.dumps({"kind": "profile", "attention_code": code, "stacks": False, **fields})
        )
        yield reported(spec, with_ceilings(folder))


def test_any_name_is_a_range_also_that_of_a_phase(report: Report) -> None:
    for phase in ("forward", "backward"):
        names = {row["range"] for row in report.table_rows("ranges", phase=phase)}
        assert set(ALL) <= names
        assert f"layers.1/{OUTER}/computing attention scores" in names


def test_names_that_the_profiler_or_we_have_are_ranges_inside_the_step(report: Report) -> None:
    (path,) = {row["range"] for row in report.table_rows("kernels", phase="forward") if "ProfilerStep" in row["range"]}
    shown = [" ".join(name.split()) for name in TAKEN]
    changed = {"": "(unnamed)", "outside": "outside (named so)", "x" * 5000: "x" * 199 + "…", "layers.0": "layers.*"}
    assert path == "/".join(["layers.*", OUTER, *(changed.get(name, name) for name in shown)])
    rows = report.table_rows("kernels", phase="forward", range=path)
    assert {row["name"]: row["calls"] for row in rows}["aten::mul"] == 2, "one in each of two layers"
    assert {row["phase"] for row in report.table_rows("kernels")} == {"forward", "backward"}
    assert report.cell()["profiled_step_ms", None]["n"] == 2


def test_operators_have_torchs_own_columns(report: Report) -> None:
    """Total time holds that of called operators, and memory that of their allocations."""
    rows = {row["name"]: row for row in report.table_rows("operators-forward")}
    matmul, bmm, softmax = rows["aten::matmul"], rows["aten::bmm"], rows["aten::_softmax"]
    assert matmul["host_total_ms"] > matmul["host_ms"]
    assert matmul["host_total_ms"] >= bmm["host_total_ms"]
    assert softmax["cpu_mib"] == pytest.approx(2 * 4 * 2 * 2 * 12 * 12 / 2**20)
    assert softmax["device_mib"] is softmax["device_total_ms"] is None
