"""What holds for every kind of job."""

import json

import pytest
from pydantic import ValidationError

from app.specs import KINDS, spec_adapter


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
    resources = example.resources()
    assert (resources.devices >= 1) == (resources.device_type != "none")
    assert all(":" in name for name in example.requirements())
    assert example.summary()
    json.dumps(example.summary())
    for field in spec.axes:
        if values := getattr(example, field):
            twice = {**json.loads(example.model_dump_json()), field: values[:1] * 2}
            with pytest.raises(ValidationError, match="is there twice"):
                spec_adapter.validate_json(json.dumps(twice))
    for preset in spec.presets.values():
        spec_adapter.validate_json(json.dumps({"kind": kind, **preset}))
