import base64
import json
from array import array

import pytest

from workers.measure.measurement import Measurement, unpack

KEYS = "the case's key", "1x NVIDIA H200"
CASE = {"model": "tiny", "context_length": 128, "compile": False, "optimizer": None}


def test_the_wire_form_is_json_with_samples() -> None:
    measurement = Measurement(CASE, *KEYS, "forward", "forward_ms", "ms", samples=array("d", [1.0, 2.0, 4.0]))
    wire = json.loads(json.dumps(measurement.to_wire()))
    assert wire["case"] == CASE
    assert (wire["case_key"], wire["device_key"]) == KEYS
    assert (wire["phase"], wire["metric"], wire["unit"]) == ("forward", "forward_ms", "ms")
    assert (wire["outcome"], wire["reason"]) == ("ok", None)
    assert list(unpack(base64.b64decode(wire["samples"]))) == [1.0, 2.0, 4.0]


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
