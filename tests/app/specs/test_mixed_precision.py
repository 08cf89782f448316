"""The spec of `mixed_precision`."""

from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.mixed_precision import MixedPrecisionSpec
from tests.app.specs.refusals import assert_refused


def test_a_job_may_do_one_of_both() -> None:
    sums, audits = MixedPrecisionSpec(audits=[]), MixedPrecisionSpec(accumulations=[])
    assert (len(sums.cells()), len(audits.cells())) == (4, 6)
    assert sums.summary().keys() == {"subject", "accumulation"}
    assert audits.summary() == {"subject": "toy/tiny transformer", "autocast": "none/fp16/bf16"}
    assert {it.key for it in (*sums.cases(), *audits.cases())} == {it.key for it in MixedPrecisionSpec().cases()}


def test_a_job_of_nothing_is_refused() -> None:
    nothing: dict[str, Any] = {"accumulations": [], "audits": []}
    assert_refused("mixed_precision", nothing, "accumulations", "give accumulations, audits or both")


@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("addend", 0.1, {"sum"}),
        ("batch_size", 2, {"toy", "transformer"}),
        ("context_length", 32, {"transformer"}),
        ("model", {"size": "small"}, {"transformer"}),
        ("model", {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}, set()),
    ],
)
def test_a_field_changes_the_cases_whose_work_it_changes(field: str, value: Any, changed: set[str]) -> None:
    def keys(**fields: Any) -> dict[str, str]:
        plain = {"accumulations": ["fp16"], "autocasts": ["bf16"], **fields}
        cases = spec_adapter.validate_python({"kind": "mixed_precision", **plain}).cases()
        return {str(case.coordinates["audit"] or "sum"): case.key for case in cases}

    before, after = keys(), keys(**{field: value})
    assert {name for name in before if before[name] != after[name]} == changed
