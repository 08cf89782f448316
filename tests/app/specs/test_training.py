"""What cannot go together in a training step is refused, in words that name the field and the cure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.specs.benchmark import BenchmarkSpec

FP16 = {"cuda_graph": True, "precision": "fp16"}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"cuda_graph": True, "device": "cpu"}, "cuda_graph", "choose device cuda"),
        ({"cuda_graph": True, "mode": "generate"}, "cuda_graph", "cache grows with each token"),
        ({**FP16, "optimizer": "adamw"}, "optimizer", "choose it, or precision bf16"),
        ({**FP16, "optimizer": "torch_adamw"}, "optimizer", "only torch_fused_adamw can decide that on the GPU"),
        ({"parameter_dtype": "bf16"}, "parameter_dtype", "need precision bf16"),
        ({"checkpoint_layers": 13}, "checkpoint_layers", "the model has 12 layers: choose that many at most"),
        ({"fused_linear_cross_entropy": True, "mode": "generate"}, "fused_linear_cross_entropy", "needs logits"),
    ],
)
def test_what_cannot_go_together_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        BenchmarkSpec(**fields)
    (error,) = caught.value.errors()
    assert error["ctx"]["field"] == field


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({}, "small, context 256"),
        ({"compile": True}, "small, context 256, compiled"),
        ({"activation_checkpointing": True, "mode": "forward"}, "small, context 256"),
        ({"checkpoint_layers": 3}, "small, context 256"),
        ({"activation_checkpointing": True}, "small, context 256, block checkpoints"),
        (
            {
                "activation_checkpointing": True,
                "checkpoint_scope": "selective",
                "checkpoint_layers": 3,
                "compile": True,
            },
            "small, context 256, compiled, selective checkpoints in 3 layers",
        ),
    ],
)
def test_titles_tell_what_is_done_to_the_model(fields: dict[str, Any], title: str) -> None:
    assert BenchmarkSpec(**fields).title("context 256") == title


@pytest.mark.parametrize("optimizer", ["adamw", "torch_adamw", "torch_fused_adamw"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_optimizer_can_be_captured(optimizer: str, precision: str) -> None:
    spec = BenchmarkSpec(cuda_graph=True, precision=precision, optimizer=optimizer, compile=True)  # type: ignore[arg-type]
    assert spec.resources().device_type == "cuda"


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_without_an_optimizer_fp16_can_be_captured_too(mode: str) -> None:
    BenchmarkSpec(**FP16, mode=mode)
    BenchmarkSpec(**FP16, optimizer="torch_fused_adamw")
