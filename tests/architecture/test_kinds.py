"""A job kind is a spec, a runner and their tests, all named after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.specs import KINDS
from workers.jobs import RUNNERS

TESTS = Path(__file__).parents[1]


def test_every_spec_has_a_runner_and_every_runner_a_spec() -> None:
    assert set(RUNNERS) == set(KINDS)
    assert KINDS


@pytest.mark.parametrize("package", ["app.specs", "workers.jobs"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_tests(kind: str, package: str) -> None:
    imported = re.compile(rf"^from {re.escape(package)}(\.| import .*\b){kind}\b", flags=re.MULTILINE)
    files = (TESTS / package.partition(".")[0]).rglob("test_*.py")
    assert any(imported.search(file.read_text()) for file in files), f"no test imports {kind} from {package}"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_is_described_and_has_a_default(kind: str) -> None:
    for name, field in KINDS[kind].model_fields.items():
        if name != "kind":
            assert not field.is_required(), f"{kind}.{name} has no default"
            assert field.description or hasattr(field.annotation, "model_fields"), f"{kind}.{name} is not described"
