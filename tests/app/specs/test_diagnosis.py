from typing import Any

import pytest
from pydantic import ValidationError

from app.specs import KINDS, spec_adapter
from app.specs.diagnosis import DiagnosisSpec

TINY: dict[str, Any] = {"kind": "benchmark", "model": {"size": "tiny"}}


def diagnosis(**fields: Any) -> DiagnosisSpec:
    return spec_adapter.validate_python({"kind": "diagnosis", "step": TINY, **fields})


def test_its_case_is_that_of_the_step_as_a_diagnosis() -> None:
    spec, step = diagnosis(), KINDS["benchmark"].model_validate(TINY)
    assert spec.case().identity == step.case().identity
    assert spec.case().key != step.case().key
    assert spec.case().key == diagnosis(budget_s=10, changes=["threads"]).case().key, "what is tried changes no case"
    assert spec.resources() == step.resources()


def test_a_seed_is_drawn_at_submission_and_kept() -> None:
    drawn = diagnosis().drawn()
    assert drawn.seed is not None
    assert drawn.drawn() == drawn


def test_a_worker_needs_the_changes_that_are_asked_for() -> None:
    assert "change:fused_optimizer" in diagnosis(changes=["fused_optimizer"]).requirements()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": {"kind": "attention"}}, "must be benchmark or ddp"),
        ({"step": {"kind": "ddp", "strategy": "flat", "prefetch": 2}}, "choose fsdp"),
        ({"step": {**TINY, "replicates": 3}}, "its own processes"),
        ({"changes": ["threads", "threads"]}, "there twice"),
        ({"step": {"kind": "diagnosis", "step": TINY}}, "diagnosis"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        diagnosis(**fields)
