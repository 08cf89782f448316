import json

import pytest

from app.presets import MODEL_SIZES
from app.specs._training import ModelSpec
from app.specs.benchmark import BenchmarkSpec
from tests.app.specs.refusals import refusals


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_sizes_and_hyper_parameters_mean_the_same(size: str) -> None:
    by_size = BenchmarkSpec.model_validate_json(json.dumps({"model": {"size": size}}))
    by_hand = BenchmarkSpec.model_validate_json(json.dumps({"model": dict(MODEL_SIZES[size])}))  # type: ignore[index]
    assert by_size.model.shape() == by_hand.model.shape() == MODEL_SIZES[size]  # type: ignore[index]
    assert by_size.model.label() == by_hand.model.label() == size


def test_a_hyper_parameter_replaces_the_presets() -> None:
    deeper = BenchmarkSpec(model=ModelSpec(size="tiny", num_layers=3))
    by_hand = BenchmarkSpec(model=ModelSpec(d_model=128, d_ff=512, num_layers=3, num_heads=4))
    assert deeper.case() == by_hand.case()
    assert deeper.model.label() == "d128-f512-l3-h4", "it is not the preset any more"
    assert BenchmarkSpec(model=ModelSpec(size="tiny", num_layers=2)).model.label() == "tiny"


def test_masks_that_hide_nothing_are_no_part_of_the_case() -> None:
    def key(mode: str = "train_step", **masks: object) -> str:
        return BenchmarkSpec(model={"size": "tiny", **masks}, context_length=64, new_tokens=8, mode=mode).case().key

    assert key() == key(window=64) == key(document_lengths=[0, 64]) != key(window=63)
    assert key(document_lengths=[40, 24]) == key(document_lengths=[40, 24], window=40)
    assert key("generate") == key("generate", window=72) != key("generate", window=71)


test_invalid_fields_are_refused_with_their_path = refusals(
    "benchmark",
    ({"precision": "tf32", "device": "cpu"}, "precision", "choose fp32 or bf16"),
    ({"model": {"d_ff": 8}}, "d_model", "give size, or all of d_model"),
    ({"mode": "generate", "top_k": 5}, "top_k", "set a temperature"),
    ({"mode": "generate", "accumulation_steps": 2}, "accumulation_steps", "has no gradients to accumulate"),
    ({"mode": "forward", "accumulation_steps": 2}, "accumulation_steps", "has no gradients to accumulate"),
    ({"model": {"size": "small", "num_kv_heads": 5}}, "num_kv_heads", "must divide num_heads (12)"),
    ({"model": {"size": "small", "document_lengths": [9]}}, "model/document_lengths", "and context_length is 256"),
    (
        {"model": {"size": "small", "document_lengths": [256]}, "mode": "generate"},
        "model/document_lengths",
        "a prompt is one document",
    ),
)
