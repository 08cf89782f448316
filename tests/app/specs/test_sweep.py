"""Expanding a grid."""

import itertools
import random
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.specs._sweep import MAX_BYTES, MAX_PROBLEMS, Point, expand


def specs(base: dict[str, Any], grid: dict[str, Any], exclude: Any = ()) -> list[dict[str, Any]]:
    return [point.spec for point in expand(base, grid, exclude)]


def test_dotted_paths_nest_and_share_nothing() -> None:
    base = {"model": {"name": "m", "inner": {"x": 0}}}
    found = specs(base, {"model.size": ["s", "t"], "model.inner.y": [1], "new.z": [2]})
    assert found == [{"model": {"name": "m", "inner": {"x": 0, "y": 1}, "size": s}, "new": {"z": 2}} for s in "st"]
    assert base == {"model": {"name": "m", "inner": {"x": 0}}}
    found[0]["model"]["size"] = found[0]["model"]["inner"]["y"] = "changed"
    assert found[1]["model"] == {"name": "m", "inner": {"x": 0, "y": 1}, "size": "t"}


def test_exclusion_is_by_partial_points(rng: random.Random) -> None:
    grid = {name: list(range(rng.randint(1, 4))) for name in "abc"}
    exclude = [{n: rng.choice(grid[n]) for n in rng.sample("abc", rng.randint(2, 3))} for _ in range(rng.randint(1, 4))]
    every = [dict(zip("abc", values, strict=True)) for values in itertools.product(*grid.values())]
    expected = [point for point in every if not any(partial.items() <= point.items() for partial in exclude)]
    if not expected:
        with pytest.raises(InvalidRequest):
            specs({}, grid, exclude)
    else:
        assert specs({}, grid, exclude) == expected


def test_json_tells_one_from_true() -> None:
    assert specs({}, {"a": [1, True, 1.0, "1"]}, [{"a": True}]) == [{"a": 1}, {"a": 1.0}, {"a": "1"}]


@pytest.mark.parametrize(
    ("location", "origin"),
    [
        (("context_length",), ("grid", "context_length", 1)),
        (("model", "size"), ("grid", "model.size", 0)),
        (("model", "size", "deep", 3), ("grid", "model.size", 0, "deep", 3)),
        (("model",), ("base", "model")),
        (("model", "d_ff"), ("base", "model", "d_ff")),
        (("kind",), ("base", "kind")),
        ((), ("base",)),
    ],
)
def test_origin(location: Any, origin: Any) -> None:
    assert Point(spec={}, choice={"context_length": 1, "model.size": 0}).origin(location) == origin


def test_a_huge_grid_is_refused_by_counting() -> None:
    grid = {f"p{number}": list(range(1000)) for number in range(32)}
    with pytest.raises(InvalidRequest, match=f"^/grid: {1000**32} combinations; a sweep has at most"):
        expand({}, grid, [{path: 0} for path in grid])


def test_a_large_base_is_not_multiplied_without_bound() -> None:
    base, grid = {"text": "x" * MAX_BYTES}, {"a": [1, 2]}
    with pytest.raises(InvalidRequest, match=r"^/base: 2 jobs with \d+ bytes of base each"):
        expand(base, grid, [])


def test_problems_are_told_up_to_a_number() -> None:
    with pytest.raises(InvalidRequest) as caught:
        expand({}, {"a": [1]}, [{"b": 1}] * 1000)
    assert len(caught.value.errors) == MAX_PROBLEMS
