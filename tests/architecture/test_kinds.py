"""A job kind is a spec, a runner and their tests, all named after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.specs import KINDS, Resources
from workers.jobs import RUNNERS

TESTS = Path(__file__).parents[1]


def test_every_spec_has_a_runner_and_every_runner_a_spec() -> None:
    assert set(RUNNERS) == set(KINDS)
    assert KINDS


@pytest.mark.parametrize("side", ["app", "workers"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_tests(kind: str, side: str) -> None:
    files = list((TESTS / side).rglob(f"test_{kind}*.py"))
    assert any("def test_" in file.read_text() for file in files), f"write tests/{side}/…/test_{kind}.py"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_an_example_that_runs_by_default(kind: str) -> None:
    spec = KINDS[kind].example()
    assert isinstance(spec.resources(), Resources)
    assert spec.coordinates()
    assert all(":" in name for name in spec.requirements())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_is_described_and_has_a_default(kind: str) -> None:
    for name, field in KINDS[kind].model_fields.items():
        if name != "kind":
            assert not field.is_required(), f"{kind}.{name} has no default"
            assert field.description or hasattr(field.annotation, "model_fields"), f"{kind}.{name} is not described"
