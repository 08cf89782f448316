"""The kinds of job, and the benchmark's spec."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.presets import MODEL_SIZES
from app.specs import KINDS, spec_adapter
from app.specs.benchmark import BenchmarkSpec, ModelSpec


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_keeps_its_promises(kind: str) -> None:
    spec = KINDS[kind]
    example = spec.example()
    assert example.kind == kind
    assert spec_adapter.validate_json(example.model_dump_json()) == example
    assert spec.table_rows
    assert spec.table_columns
    assert set(spec.table_rows) <= set(example.coordinates())
    assert example.resources().devices >= 1
    assert all(":" in name for name in example.requirements())
    json.dumps(example.coordinates())
    for preset in spec.presets.values():
        spec_adapter.validate_json(json.dumps({"kind": kind, **preset}))


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_sizes_and_hyper_parameters_mean_the_same(size: str) -> None:
    by_size = BenchmarkSpec.model_validate_json(json.dumps({"model": {"size": size}}))
    by_hand = BenchmarkSpec.model_validate_json(json.dumps({"model": dict(MODEL_SIZES[size])}))  # type: ignore[index]
    assert by_size.model.shape() == by_hand.model.shape() == MODEL_SIZES[size]  # type: ignore[index]
    assert by_size.model.label() == size
    assert by_hand.model.label().startswith("d")


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_presets_have_even_head_dimensions(size: str) -> None:
    shape = MODEL_SIZES[size]  # type: ignore[index]
    assert shape["d_model"] % (2 * shape["num_heads"]) == 0


def test_specs_are_frozen_and_compared_by_value() -> None:
    spec = BenchmarkSpec()
    assert spec == BenchmarkSpec(model=ModelSpec(size="small"))
    with pytest.raises(ValidationError):
        spec.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 8}, {"context_length": 512}, {"precision": "bf16"}, {"compile": True}, {"attention": "flex"},
        {"activation_checkpointing": True}, {"optimizer": "torch_adamw"}, {"mode": "forward"}, {"warmup_steps": 0},
        {"model": {"size": "tiny"}},
    ],
    ids=str,
)  # fmt: skip
def test_coordinates_tell_different_work_apart(change: dict[str, Any]) -> None:
    changed = BenchmarkSpec.model_validate_json(json.dumps(change))
    assert changed.coordinates() != BenchmarkSpec().coordinates()
