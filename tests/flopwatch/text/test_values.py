"""Values as people type them."""

from typing import Any

import pytest

from flopwatch.text.values import parse_json, parse_value, value_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128", 128),
        ("true", True),
        ("False", False),
        ("007", "007"),
        ("1e3", 1000.0),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("tiny", "tiny"),
        ('"128"', "128"),
        ("NaN", "NaN"),
        ("[" * 100_000, "[" * 100_000),
        ("", ""),
    ],
)
def test_a_value(text: str, value: Any) -> None:
    assert (parse_value(text), type(parse_value(text))) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        (r'"\ud800"', "unpaired surrogate"),
        ("[NaN]", "NaN is no number"),
        ("1e999", "1e999 is too large"),
        ("{", "Expecting"),
    ],
)
def test_json_that_the_api_refuses(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


@pytest.mark.parametrize("value", ["fp32", 128, 0.5, True, False])
def test_a_written_value_is_parsed_to_the_same(value: Any) -> None:
    assert parse_value(value_text(value)) == value


def test_objects_and_nothing() -> None:
    assert value_text({"size": "tiny", "layers": [1, None]}) == "tiny/1/none"
