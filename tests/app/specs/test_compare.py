"""The spec of a comparison: two specs of one kind."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.specs import SpecBase, spec_adapter
from app.specs.compare import CompareSpec
from tests.app.specs.refusals import refusals

TINY = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64}
GRID = {"kind": "attention", "implementations": ["eager", "tiled"], "sequence_lengths": [16, 32], "dtypes": ["fp32"]}


def compare(baseline: Any = TINY, candidate: Any = TINY, **fields: Any) -> CompareSpec:
    spec = {"kind": "compare", "baseline": baseline, "candidate": candidate, **fields}
    return spec_adapter.validate_json(json.dumps(spec))


def alone(spec: dict[str, Any]) -> SpecBase:
    return spec_adapter.validate_json(json.dumps(spec))


@pytest.mark.parametrize("spec", [TINY, GRID], ids=["benchmark", "attention"])
def test_both_sides_keep_the_keys_of_their_cases(spec: dict[str, Any]) -> None:
    other = {**spec, "warmup_steps": 7}
    keys = [case.key for case in compare(spec, other, replicates=3).cases()]
    assert keys == [case.key for case in [*alone(spec).cases(), *alone(other).cases()]]
    assert len(set(keys)) == len(keys)


def test_it_needs_what_both_sides_need() -> None:
    spec = compare({**TINY, "attention": "tiled"}, {**TINY, "attention": "flex"})
    assert spec.requirements() == {"attention:tiled", "attention:flex", "model:transformer_lm"}


@pytest.mark.parametrize(
    ("baseline", "candidate", "expected"),
    [("auto", "auto", "auto"), ("cpu", "cpu", "cpu"), ("auto", "cuda", "cuda"), ("cpu", "auto", "cpu")],
)
def test_auto_is_the_device_of_the_other_side(baseline: str, candidate: str, expected: str) -> None:
    spec = compare({**TINY, "device": baseline}, {**TINY, "device": candidate})
    assert (spec.resources().device_type, spec.resources().devices) == (expected, 1)


def test_a_cuda_graph_can_be_compared_with_none() -> None:
    graph = {**TINY, "mode": "forward", "cuda_graph": True}
    assert compare({**graph, "cuda_graph": False}, graph).resources().device_type == "cuda"


test_sides_that_do_not_go_together_are_refused = refusals(
    "compare",
    ({"candidate": {**TINY, "replicates": 3}}, "candidate/replicates", "leave it out"),
    ({"baseline": {**TINY, "replicates": 3}}, "baseline/replicates", "leave it out"),
    ({"candidate": GRID}, "candidate/kind", "must be benchmark"),
    (
        {"baseline": {**TINY, "device": "cpu"}, "candidate": {**TINY, "device": "cuda"}},
        "candidate",
        "needs 1 × cuda, the baseline 1 × cpu",
    ),
    baseline=TINY,
    candidate=TINY,
)


@pytest.mark.parametrize("left_out", [["baseline"], ["candidate"], ["baseline", "candidate"]], ids=" and ".join)
def test_no_side_is_made_up(left_out: list[str]) -> None:
    sides = {side: TINY for side in ("baseline", "candidate") if side not in left_out}
    with pytest.raises(ValidationError) as refused:
        spec_adapter.validate_json(json.dumps({"kind": "compare", **sides}))
    assert [(error["type"], error["loc"]) for error in refused.value.errors()] == [
        ("missing", ("compare", side)) for side in left_out
    ]


def test_a_summary_has_what_differs() -> None:
    summary = compare(TINY, {**TINY, "precision": "bf16", "compile": True}).summary()
    assert {"model": "tiny", "precision": "fp32 → bf16", "compile": "false → true"}.items() <= summary.items()
    assert "attention" not in summary
