"""What holds for every kind of job."""

import json
from typing import Annotated

import pytest
from pydantic import Field

from app.specs import KINDS, spec_adapter
from app.specs._base import Name, Named, Needs, StrictModel, names_in


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
    for preset in spec.presets.values():
        spec_adapter.validate_json(json.dumps({"kind": kind, **preset}))


class Inner(StrictModel):
    model: Annotated[Name, Named("model")] = "plain"


class Marked(StrictModel):
    switch: Annotated[bool, Needs("tool", "nsys")] = False
    options: Annotated[Inner | None, Needs("tool", "ncu")] = None
    number: Annotated[int | None, Needs("tool", "counter")] = None
    names: list[Annotated[Name, Named("attention")]] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, []),
        ({"switch": True}, [(("switch",), "tool", "nsys")]),
        ({"switch": False, "options": None}, []),
        ({"options": {}}, [(("options",), "tool", "ncu"), (("options", "model"), "model", "plain")]),
        ({"number": 0}, [(("number",), "tool", "counter")]),
        ({"names": ["a", "b"]}, [(("names", 0), "attention", "a"), (("names", 1), "attention", "b")]),
    ],
)
def test_what_a_marked_field_needs_follows_from_its_value(fields: dict[str, object], needed: list[object]) -> None:
    assert list(names_in(Marked.model_validate(fields))) == needed


def test_marks_are_in_the_schema() -> None:
    properties = Marked.model_json_schema()["properties"]
    assert {name: field.get("x-flopwatch-needs") for name, field in properties.items()} == {
        "switch": "tool:nsys",
        "options": "tool:ncu",
        "number": "tool:counter",
        "names": None,
    }
