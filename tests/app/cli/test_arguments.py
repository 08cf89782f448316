"""key=value arguments."""

from typing import Any

import pytest
import typer

from app.cli import arguments


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


@pytest.mark.parametrize("argument", ["novalue", "=1", ".a=1", "a..b=1", "a.=1"])
def test_a_malformed_pair_is_refused(argument: str) -> None:
    with pytest.raises(typer.BadParameter):
        arguments.parse_spec("benchmark", [argument])


def test_a_value_has_nothing_inside() -> None:
    with pytest.raises(typer.BadParameter, match="has a value already"):
        arguments.parse_spec("benchmark", ["model=tiny", "model.size=tiny"])


@pytest.mark.parametrize(
    "given",
    [
        ["seed=1", "seed=1"], ["kind=attention"], ["model.size=tiny", "model.size=small"],
        ['model={"size": "tiny"}', "model.size=small"], ["model.size=tiny", 'model={"size": "small"}'],
    ],
)  # fmt: skip
def test_a_key_is_given_once(given: list[str]) -> None:
    with pytest.raises(typer.BadParameter, match="is given twice"):
        arguments.parse_spec("benchmark", given)
    for swept in (["batch_size=1,2", *given], ["seed=1,2", "seed=3"], ["seed=1", "seed=2,3"], ["seed=1,2", "seed=3,4"]):
        with pytest.raises(typer.BadParameter, match="is given twice"):
            arguments.parse_sweep("benchmark", swept)


def test_labels_and_points_have_a_key_once() -> None:
    assert arguments.parse_pairs(["a=1", "b=1"]) == {"a": "1", "b": "1"}
    with pytest.raises(typer.BadParameter, match="a is given twice"):
        arguments.parse_pairs(["a=1", "a=2"])
    with pytest.raises(typer.BadParameter, match="seed is given twice"):
        arguments.parse_point("seed=1,seed=2")


def test_arguments_replace_fields_of_the_preset() -> None:
    preset = {"model": {"size": "small"}, "batch_size": 4, "dtypes": ["fp32"]}
    given = ["model.vocab_size=50", "model.size=tiny", "dtypes=bf16"]
    assert arguments.parse_spec("x", given, preset=preset, lists={"dtypes"}) == {
        "kind": "x",
        "model": {"size": "tiny", "vocab_size": 50},
        "batch_size": 4,
        "dtypes": ["bf16"],
    }
    whole = arguments.parse_spec("x", ['model={"name": "own"}'], preset=preset)
    assert whole["model"] == {"name": "own"}, "a whole object replaces the preset's"
    base, grid = arguments.parse_sweep("x", ["batch_size=1,2", "model.size=tiny"], preset=preset)
    assert (base["model"], base["dtypes"], grid) == ({"size": "tiny"}, ["fp32"], {"batch_size": [1, 2]})
    assert preset == {"model": {"size": "small"}, "batch_size": 4, "dtypes": ["fp32"]}


@pytest.mark.parametrize(
    ("text", "one", "several"),
    [
        ("128", [128], [[128]]),
        ("eager,triton", ["eager", "triton"], [["eager"], ["triton"]]),
        ('["eager","triton"]', ["eager", "triton"], [["eager", "triton"]]),
        ("[eager, triton]", ["eager", "triton"], [["eager", "triton"]]),
    ],
)
def test_fields_that_are_lists(text: str, one: list[Any], several: list[list[Any]]) -> None:
    assert arguments.parse_spec("x", [f"names={text}"], lists={"names"})["names"] == one
    base, grid = arguments.parse_sweep("x", [f"names={text}", "seed=1,2"], lists={"names"})
    assert ([base["names"]] if "names" in base else grid["names"]) == several


def test_a_grid_of_lists_and_points_of_it() -> None:
    _, grid = arguments.parse_sweep("x", ["names=[eager,triton],flex,[128]"], lists={"names"})
    assert grid == {"names": [["eager", "triton"], ["flex"], [128]]}
    assert arguments.parse_point("names=[eager,triton],seed=1", {"names"}) == {"names": ["eager", "triton"], "seed": 1}
    assert arguments.parse_point("names=flex", {"names"}) == {"names": ["flex"]}


def test_a_sweep_varies_something() -> None:
    with pytest.raises(typer.BadParameter, match="flopwatch submit"):
        arguments.parse_sweep("benchmark", ["batch_size=2"])


@pytest.mark.parametrize("text", ["null", "None"])
def test_a_list_field_can_be_null(text: str) -> None:
    assert arguments.parse_spec("profile", [f"phases={text}"], lists={"phases"})["phases"] is None
    base, grid = arguments.parse_sweep("profile", [f"phases={text},forward", "br=null"], lists={"phases", "br"})
    assert (base["br"], grid["phases"]) == (None, [None, ["forward"]])


@pytest.mark.parametrize(
    "argument", ["attention=mine.py", "implementations=[mine.py:fast]", "candidate.attention=a.py:f"]
)
def test_a_file_in_place_of_a_name_is_told_its_option(argument: str) -> None:
    with pytest.raises(typer.BadParameter, match="goes in by --implementation"):
        arguments.parse_spec("benchmark", [argument])
    with pytest.raises(typer.BadParameter, match="goes in by --model"):
        arguments.parse_spec("benchmark", ["model=mine.py"])


@pytest.mark.parametrize("argument", ["model.size=", "model.size=[]"])
def test_a_key_without_a_value_is_named(argument: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"model\.size has no value; give one"):
        arguments.parse_sweep("benchmark", [argument, "context_length=32,64"])
