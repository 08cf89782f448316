"""Which specs a check measures in turns, and with how many processes."""

from typing import Any

import pytest

from flopwatch import alternating


def job(sha256: str | None, **fields: Any) -> dict[str, Any]:
    code = None if sha256 is None else {"sha256": sha256, "function": "f", "file": "a.py", "revision": {"dirty": True}}
    return {"spec": {"kind": "attention", "code": code, "seed": 0, "dtypes": [], **fields}}


def test_versions_of_the_same_work_are_compared_once() -> None:
    baseline = [job("old", seed=1, replicates=8), job("old", seed=2), job("old", dtypes=["fp32"])]
    candidate = [job("new", seed=5), job("new", seed=6), job("new", dtypes=["bf16"])]
    (spec,), are_all = alternating.comparisons(baseline, candidate)
    assert [spec[side]["code"]["sha256"] for side in ("baseline", "candidate")] == ["old", "new"]
    assert "replicates" not in spec["baseline"]
    assert not are_all, "nothing of the baseline is like the work in bf16"
    assert alternating.comparisons(baseline, candidate[:2]) == ([spec], True)


def test_of_a_diagnosis_the_step_is_measured_in_turns() -> None:
    step = {"kind": "benchmark", "seed": 1}
    assert alternating.of_side({"kind": "diagnosis", "seed": 2, "step": step}) == step


def test_a_baseline_of_an_earlier_release_lacks_later_fields() -> None:
    (spec,), _ = alternating.comparisons([job("old")], [job("new", window=None)])
    assert spec["baseline"] == {**job("old")["spec"], "window": None}
    assert alternating.comparisons([job("old")], [job(None)]) == ([], False)


def test_equal_code_and_no_code_are_not() -> None:
    assert alternating.comparisons([job("old")], [job("old")]) == ([], False)
    assert alternating.comparisons([job(None)], [job(None)]) == ([], False)


@pytest.mark.parametrize(("needed", "number"), [(3, 8), (20, 20), (900, 40), (None, 40)])
def test_the_number_of_processes_follows_the_noise(needed: int | None, number: int) -> None:
    tested = {"metric": "step_ms", "finding": "inconclusive", "spread_percent": 9.0, "replicates_for_3_percent": needed}
    others = [{"metric": "mfu", "finding": "differs"}, tested | {"metric": "rest_ms", "replicates_for_3_percent": 35}]
    comparison = {"rows": [tested, *others], "gate": {"metrics": ["step_ms"]}}
    assert alternating.replicates(comparison, 4.5) == number
    tested["finding"] = "worse"
    assert alternating.replicates(comparison, 4.5) == number, "what is slower is measured again, too"
    tested["spread_percent"] = None
    assert alternating.replicates(comparison, 4.5) == 8, "one process has no spread"
