"""What cannot go together in a training step is refused, in words that name the field and the cure."""

from typing import Any

import pytest

from app.specs.benchmark import BenchmarkSpec
from app.specs.ddp import DdpSpec
from app.specs.memory import MemorySpec
from app.specs.profile import ProfileSpec
from tests.app.specs.refusals import refusals

STEP = {"sha256": "0" * 64, "function": "make_step", "file": "my_train.py"}


@pytest.mark.parametrize("kind", [BenchmarkSpec, DdpSpec, MemorySpec, ProfileSpec])
def test_a_step_of_ones_own_needs_no_model_and_no_attention_of_ours(kind: Any) -> None:
    assert {"model:transformer_lm", "attention:eager"} <= kind().requirements()
    assert kind(step_code=STEP).requirements() == {"code:uploaded"}


FP16 = {"cuda_graph": True, "precision": "fp16"}
MASTER = {"master_weights": True, "precision": "bf16", "parameter_dtype": "bf16"}


test_what_cannot_go_together_is_refused = refusals(
    "benchmark",
    ({"cuda_graph": True, "device": "cpu"}, "cuda_graph", "choose device cuda"),
    ({"cuda_graph": True, "mode": "generate"}, "cuda_graph", "cache grows with each token"),
    ({**FP16, "optimizer": "adamw"}, "optimizer", "choose it, or precision bf16"),
    ({"parameter_dtype": "bf16"}, "parameter_dtype", "need precision bf16 or fp8"),
    ({"precision": "fp8", "mode": "generate"}, "precision", "fp8 is for training: choose bf16, or another mode"),
    ({"precision": "fp8", "step_code": STEP}, "precision", "converts its own layers"),
    ({"precision": "fp8", "fp8_filter": ["a", "b", "a"]}, "fp8_filter", "there twice"),
    ({"precision": "fp8", "fp8_filter": ["all", "lm_head"]}, "fp8_filter", "'all' goes alone"),
    ({"precision": "fp8", "batch_size": 3, "context_length": 8}, "context_length", "= 24 tokens, and fp8 takes"),
    ({"master_weights": True}, "master_weights", "needs parameter_dtype bf16, and precision bf16 or fp8"),
    ({**MASTER, "optimizer": "torch_adamw"}, "master_weights", "choose optimizer adamw or triton_adamw"),
    (
        {"activation_checkpointing": True, "checkpoint_blocks": 13},
        "checkpoint_blocks",
        "12 blocks are recomputed: choose that many at most",
    ),
    ({"checkpoint_layers": 13}, "checkpoint_layers", "the model has 12 layers: choose that many at most"),
    ({"fused_linear_cross_entropy": True, "mode": "generate"}, "fused_linear_cross_entropy", "needs logits"),
    ({"fused": ["rope"], "device": "cpu"}, "fused", "leave it out, or choose device cuda"),
    ({"optimizer": "triton_adamw", "device": "cpu"}, "optimizer", "choose adamw, or device cuda"),
    ({**FP16, "optimizer": "triton_adamw"}, "optimizer", "only torch_fused_adamw can decide that on the GPU"),
    ({"fused": ["rope", "rms_norm", "rope"]}, "fused", "'rope' is there twice"),
    ({"fused": ["linear_cross_entropy"], "mode": "generate"}, "fused", "has no loss: leave linear_cross_entropy"),
    (
        {"fused": ["linear_cross_entropy"], "fused_linear_cross_entropy": True},
        "fused_linear_cross_entropy",
        "does the same: leave one of them out",
    ),
)


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_without_an_optimizer_fp16_can_be_captured_too(mode: str) -> None:
    BenchmarkSpec(**FP16, mode=mode)
    BenchmarkSpec(**FP16, optimizer="torch_fused_adamw")


def test_fused_parts_are_of_the_case_in_any_order() -> None:
    plain, one, other = (BenchmarkSpec(fused=parts) for parts in ([], ["rms_norm", "rope"], ["rope", "rms_norm"]))  # type: ignore[arg-type]
    assert one.case().key == other.case().key != plain.case().key
    assert one.case().identity["fused"] == "rms_norm/rope"
    assert plain.case().identity["fused"] is None
    assert BenchmarkSpec().case().key == plain.case().key, "as before there was such a field"


def test_fused_parts_need_a_gpu() -> None:
    assert BenchmarkSpec(fused=["rope"]).resources().device_type == "cuda"
    assert BenchmarkSpec(fused=["linear_cross_entropy"]).model_has_loss
    assert not BenchmarkSpec(fused=["rope"]).model_has_loss
    assert DdpSpec(fused=["rope"], backend="nccl").resources().device_type == "cuda"


def test_the_optimizer_in_triton_needs_a_gpu() -> None:
    chosen = {"optimizer": "triton_adamw"}
    assert BenchmarkSpec(**chosen).resources().device_type == "cuda"
    assert BenchmarkSpec(**chosen, mode="forward", device="cpu").resources().device_type == "cpu", "it has no optimizer"
    assert BenchmarkSpec(**chosen).case().key != BenchmarkSpec(optimizer="adamw").case().key
    assert DdpSpec(**chosen, backend="nccl").resources().device_type == "cuda"


def test_patterns_of_fp8_have_no_order() -> None:
    one, other = (BenchmarkSpec(precision="fp8", fp8_filter=names) for names in (["a", "b"], ["b", "a"]))
    assert one.case(one.cells()[0]).key == other.case(other.cells()[0]).key
