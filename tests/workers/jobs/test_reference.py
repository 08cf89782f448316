"""What a model takes in place of plain PyTorch is checked before anything is timed, in every kind with a model."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.specs import spec_adapter
from kernels.attention.reference import attention as right
from kernels.registry import ATTENTION, Implementation
from parallel import process_group
from tests.workers.reporting import reported
from workers.jobs import _ranks, _reference
from workers.jobs.profile import torch_profiler
from workers.measure.errors import NotMeasured
from workers.measure.judging import WrongResult

SIZES = {"d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 31}
SMALL = {"model": SIZES, "batch_size": 2, "context_length": 12, "device": "cpu"}
FEW = {"warmup_steps": 1, "measure_steps": 2}
CPU = torch.device("cpu")

HEAD = """
import math
import torch

def plain(q, k, v, is_causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v
"""
WRONG = {
    "not causal": ("return plain(q, k, v, False)", "the output: relative error"),
    "half a gradient": (
        "out = plain(q, k, v, is_causal); return out + (out * 0.5 - (out * 0.5).detach()) * -1",
        "the gradient of q",
    ),
    "another dtype": ("return plain(q.double(), k.double(), v.double(), is_causal)", "is of torch.float64"),
    "another shape": ("return plain(q, k, v, is_causal)[:, :1]", "has the shape (2, 1, 12, 8)"),
    "changes its inputs": (
        "out = plain(q.clone(), k.clone(), v.clone(), is_causal); v.data.mul_(2); return out",
        "it changes v in place",
    ),
    "takes memory for contiguous": (
        "return plain(q, k, torch.as_strided(v, v.shape, torch.empty(v.shape).stride()), is_causal)",
        "not contiguous, as in the model",
    ),
}


@pytest.fixture
def put(upload) -> Callable[[str], dict[str, Any]]:
    """Upload the body of an attention; returns the spec's `attention_code`."""
    return lambda body: upload(f"{HEAD}\ndef attention(q, k, v, is_causal):\n    {body}\n", "attention")


def parsed(kind: str, **fields: Any) -> Any:
    return spec_adapter.validate_json(json.dumps({"kind": kind, **SMALL, **fields}))


def in_this_process(function: Any, *arguments: Any, reported: Any, folder: Path, **_: Any) -> None:
    """Run the one rank of a group here, as `launch` runs it in a process of its own."""

    class Here(process_group.Rank):
        def report(self, message: Any) -> None:
            reported(0, message)

    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        function(Here(0, 1, "gloo", CPU, None), *arguments)  # type: ignore[arg-type]
    except Exception as error:
        raise process_group.RanksFailed(0, "raised", trace=str(error)) from error
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_attention_is_found(put: Any, how: str) -> None:
    body, words = WRONG[how]
    with pytest.raises(WrongResult, match=r"^attention 'attention@mine\.py' is wrong: ") as raised:
        _reference.check_parts(parsed("benchmark", attention_code=put(body), mode="forward_backward"), CPU)
    assert words in str(raised.value)


@pytest.mark.parametrize("fields", [
    {"precision": "bf16"}, {"precision": "fp16"}, {"mode": "forward"},
    {"mode": "generate", "new_tokens": 3},
])  # fmt: skip
def test_a_right_attention_is_right(put: Any, fields: dict[str, Any]) -> None:
    code = put("return plain(q, k, v, is_causal)")
    checks = _reference.check_parts(parsed("benchmark", attention_code=code, **fields), CPU)
    assert [check.ok for check in checks] == [True] * (3 if fields.get("mode") == "generate" else 1)


def test_a_lone_query_of_generation_is_checked_too(put: Any) -> None:
    """It sees all keys: an attention that takes every call for a causal one hides all but the first."""
    code = put("return plain(q, k, v, True)")
    _reference.check_parts(parsed("benchmark", attention_code=code, mode="forward"), CPU)
    with pytest.raises(WrongResult, match="of a single query and 13 keys is wrong"):
        _reference.check_parts(parsed("benchmark", attention_code=code, mode="generate", new_tokens=3), CPU)


def test_a_length_that_no_tile_fits_is_checked(put: Any) -> None:
    code = put("n = k.shape[-2] // 16 * 16; return plain(q, k[..., :n, :], v[..., :n, :], is_causal)")
    spec = parsed("benchmark", attention_code=code, mode="generate", context_length=64, new_tokens=16)
    with pytest.raises(WrongResult, match="of a single query and 65 keys is wrong"):
        _reference.check_parts(spec, CPU)


@pytest.mark.parametrize(("kind", "fields"), [
    ("benchmark", FEW), ("profile", FEW), ("memory", {}), ("ddp", {"backend": "gloo", "world_size": 1, **FEW}),
])  # fmt: skip
def test_a_wrong_attention_has_no_values_in_any_kind(put, tmp_path, monkeypatch, kind, fields) -> None:
    monkeypatch.setattr(torch_profiler, "has_roofline", lambda spec: False)  # its ceilings take seconds to measure
    monkeypatch.setattr(_ranks, "launch", in_this_process)
    report = reported(parsed(kind, attention_code=put(WRONG["not causal"][0]), **fields), tmp_path)
    assert {row["outcome"] for row in report.rows} == {"wrong"}
    assert all(row["samples"] is None for row in report.rows)
    assert "attention 'attention@mine.py' is wrong: the output" in report.rows[0]["reason"]
    (verdict,) = report.verdicts.values()
    assert verdict["verdict"] == "wrong"
    assert all(not table["rows"] for name, table in report.tables.items() if name != "ceilings")


def test_an_installed_one_is_checked_like_an_uploaded_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in the audit of data types, which is a grid of cells."""
    wrong = Implementation("theirs", lambda q, k, v, _causal: right(q, k, v, False), {"cpu": frozenset({"float32"})})
    load = ATTENTION.load
    monkeypatch.setattr(ATTENTION, "load", lambda name: wrong if name == "theirs" else load(name))
    spec = parsed("mixed_precision", attention="theirs", accumulations=[], audits=["transformer"], autocasts=["none"])
    report = reported(spec, tmp_path)
    assert {row["outcome"] for row in report.rows} == {"wrong"}
    assert report.verdict_on(audit="transformer")["verdict"] == "wrong"


def test_a_part_without_memory_for_its_reference_says_so(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: tried 9 GiB")

    monkeypatch.setattr(_reference, "fault_of", lacks)
    (check,) = _reference.check_parts(parsed("benchmark", attention_code=put(WRONG["not causal"][0])), CPU)
    assert (check.ok, check.severity) == (False, "suspect")
    assert "is not checked: no memory" in check.detail


@pytest.mark.parametrize("name", ["rms_norm", "rope", "linear_cross_entropy"])
def test_fused_kernels_are_checked_at_the_models_shapes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The spec is one for a GPU; its parts run here in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's kernels are interpreted on a CPU only")
    spec = parsed("benchmark", fused=[name], device="cuda")
    (check,) = _reference.check_parts(spec, CPU)
    assert check.ok, check.detail
    import kernels

    kernel = getattr(kernels, name)
    monkeypatch.setattr(
        kernels, name, functools.wraps(kernel)(lambda *inputs, **named: 1.01 * kernel(*inputs, **named))
    )
    with pytest.raises(NotMeasured, match=f"fused {name} is wrong"):
        _reference.check_parts(spec, CPU)
