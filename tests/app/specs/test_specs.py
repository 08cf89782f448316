"""The kinds of job, and the benchmark's spec."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from app.presets import MODEL_SIZES
from app.specs import KINDS, spec_adapter
from app.specs._training import ModelSpec
from app.specs.benchmark import BenchmarkSpec


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_keeps_its_promises(kind: str) -> None:
    spec = KINDS[kind]
    example = spec.example()
    assert example.kind == kind
    assert spec_adapter.validate_json(example.model_dump_json()) == example
    assert spec.table_rows
    coordinates = {name for case in example.cases() for name in case.coordinates}
    assert set(spec.table_rows) <= coordinates | ({"side"} if spec.holds_specs else set())
    assert spec.table_columns or spec.holds_specs, "which columns there are follows from the specs inside"
    assert example.resources().devices >= 1
    assert all(":" in name for name in example.requirements())
    assert example.summary()
    json.dumps(example.summary())
    for preset in spec.presets.values():
        spec_adapter.validate_json(json.dumps({"kind": kind, **preset}))


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_sizes_and_hyper_parameters_mean_the_same(size: str) -> None:
    by_size = BenchmarkSpec.model_validate_json(json.dumps({"model": {"size": size}}))
    by_hand = BenchmarkSpec.model_validate_json(json.dumps({"model": dict(MODEL_SIZES[size])}))  # type: ignore[index]
    assert by_size.model.shape() == by_hand.model.shape() == MODEL_SIZES[size]  # type: ignore[index]
    assert by_size.model.label() == by_hand.model.label() == size


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_presets_have_even_head_dimensions(size: str) -> None:
    shape = MODEL_SIZES[size]  # type: ignore[index]
    assert shape["d_model"] % (2 * shape["num_heads"]) == 0


def test_specs_are_frozen_and_compared_by_value() -> None:
    spec = BenchmarkSpec()
    assert spec == BenchmarkSpec(model=ModelSpec(size="small"))
    with pytest.raises(ValidationError):
        spec.seed = 1  # type: ignore[misc]
