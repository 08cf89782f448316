import pytest

from workers.measure.measurement import Measurement

KEYS = "the case's key", "1x NVIDIA H200"
CASE = {"model": "tiny", "context_length": 128, "compile": False, "optimizer": None}


def test_a_missing_value_is_null_and_never_zero() -> None:
    wire = Measurement(CASE, *KEYS, None, "mfu", "fraction", outcome="unknown", reason="no peak").to_wire()
    assert (wire["reason"], wire["samples"]) == ("no peak", None)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"samples": []}, {"samples": [1.0, float("nan")]}, {"outcome": "oom"}),
        {"outcome": "oom", "reason": "too big", "samples": [1.0]},
    ],
)
def test_a_value_and_its_absence_exclude_each_other(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"step_ms: (outcome|a sample is not finite)"):
        Measurement(CASE, *KEYS, None, "step_ms", "ms", **fields)  # type: ignore[arg-type]
