"""key=value arguments."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from app.cli import arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128", 128), ("-1.5", -1.5), ("1e3", 1000.0), ("true", True), ("null", None), ("tiny", "tiny"), ("", ""),
        ("2.7b", "2.7b"), ("[1, 2]", [1, 2]), ('{"size": "xl"}', {"size": "xl"}), ('"128"', "128"), ("NaN", "NaN"),
        ("-Infinity", "-Infinity"), ("True", "True"), ("a=b", "a=b"), ("[1", "[1"), ("007", "007"),
    ],
)  # fmt: skip
def test_values_are_json_where_they_parse(text: str, value: Any) -> None:
    parsed = arguments.parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("128,256", [128, 256]), ("tiny,small", ["tiny", "small"]), ("tiny,128", ["tiny", 128]), ("8", [8]),
        ("[1,2],[3]", [[1, 2], [3]]), ("[1,2]", [[1, 2]]), ("true,false", [True, False]), ("", [""]), ("a,", ["a", ""]),
        ("NaN,1", ["NaN", 1]),
    ],
)  # fmt: skip
def test_lists_of_values(text: str, values: list[Any]) -> None:
    assert arguments.parse_values(text) == values


def test_spec() -> None:
    spec = arguments.parse_spec(
        "benchmark", ["model.size=tiny", "model.vocab_size=50", "context_length=8", "compile=true"]
    )
    assert spec == {
        "kind": "benchmark",
        "model": {"size": "tiny", "vocab_size": 50},
        "context_length": 8,
        "compile": True,
    }


def test_sweep() -> None:
    base, grid = arguments.parse_sweep("benchmark", ["model.size=tiny,small", "batch_size=2", "context_length=8,16"])
    assert base == {"kind": "benchmark", "batch_size": 2}
    assert grid == {"model.size": ["tiny", "small"], "context_length": [8, 16]}


def test_point() -> None:
    assert arguments.parse_point("model.size=xl,context_length=512") == {"model.size": "xl", "context_length": 512}


@pytest.mark.parametrize("argument", ["novalue", "=1", ".a=1", "a..b=1", "a.=1"])
def test_what_is_no_pair(argument: str) -> None:
    with pytest.raises(typer.BadParameter):
        arguments.parse_spec("benchmark", [argument])


def test_a_value_has_nothing_inside() -> None:
    with pytest.raises(typer.BadParameter, match="has a value already"):
        arguments.parse_spec("benchmark", ["model=tiny", "model.size=tiny"])


def test_a_sweep_varies_something() -> None:
    with pytest.raises(typer.BadParameter, match="flopwatch submit"):
        arguments.parse_sweep("benchmark", ["batch_size=2"])
